"""One grammar in a process of its own: tries its forms in order, under limits that the kernel holds."""

from __future__ import annotations

import hashlib
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from grammar_sync.engines.backend import GrammarBackend
from grammar_sync.engines.prepared import CompileError, PreparedGrammar
from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import (
    CandidateRefused,
    Candidates,
    Phase,
    Refused,
    Vetted,
    VettingLimits,
    WorkerWord,
)
from grammar_sync.vetting.probe import ProbeError, probe
from grammar_sync.vocabulary import GrammarVocabulary

_UNLIMITED_THREAD_STACK_BYTES = 2 << 20
_MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        spec: The grammar.
        skip: How many of its forms were tried already.
        budget_s: Seconds of CPU that are left for compiling.
    """

    spec: GrammarSpec
    skip: int
    budget_s: float


def limit_this_process(limits: VettingLimits) -> None:
    """Bounds what this process may allocate from now on, and its stack; it leaves no core file.

    The stack is half of what a thread of a rank has, so that what passes here has room there.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for crash in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL):
        # An engine's library has handlers that unwind the stack, which takes longer than the compile may.
        signal.signal(crash, signal.SIG_DFL)
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - a few microseconds instead of fifty
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, used_bytes + limits.memory_bytes)
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    thread_bytes = _UNLIMITED_THREAD_STACK_BYTES if soft == resource.RLIM_INFINITY else soft
    _lower(resource.RLIMIT_STACK, thread_bytes // 2)


def vet(
    backend: GrammarBackend,
    job: Job,
    limits: VettingLimits,
    vocabulary: GrammarVocabulary,
    say: Callable[[WorkerWord], None],
) -> None:
    """Tries a grammar's forms until one passes, and says what it does before it does it.

    A form that is too slow or crashes ends the process; whoever started it goes on with the next form. The CPU time
    that a form may take, when another one is left, is half of what there is.
    """
    _arm_timer(job.budget_s)
    try:
        candidates = backend.prepare(job.spec)
    except CompileError as error:
        say(Refused("grammar", str(error)))
        return
    say(Candidates(tuple(prepared.engine for prepared in candidates)))
    left_s = job.budget_s
    for index in range(job.skip, len(candidates)):
        start_s = time.process_time()
        say(Phase(index, "compile"))
        _arm_timer(left_s if index == len(candidates) - 1 else left_s / 2)
        try:
            before_probe = partial(say, Phase(index, "probe"))
            passed = _vet_candidate(backend, candidates[index], limits, vocabulary, before_probe)
        except CompileError as error:
            reason = memory_refusal(limits) if "bad_alloc" in str(error) else Refused("grammar", str(error))
            say(CandidateRefused(index, reason))
        except ProbeError as error:
            say(CandidateRefused(index, Refused("masks", str(error))))
        except MemoryError:
            say(CandidateRefused(index, memory_refusal(limits)))
        else:
            say(passed)
            return
        left_s -= time.process_time() - start_s


def memory_refusal(limits: VettingLimits) -> Refused:
    """Returns what is said of a grammar that needed too much memory."""
    return Refused("memory", f"it needs more than {limits.memory_bytes // _MIB} MiB to compile")


def _vet_candidate(
    backend: GrammarBackend,
    prepared: PreparedGrammar,
    limits: VettingLimits,
    vocabulary: GrammarVocabulary,
    before_probe: Callable[[], None],
) -> Vetted:
    start_s = time.process_time()
    compiled = backend.compile(prepared)
    compile_s = time.process_time() - start_s
    before_probe()
    _arm_timer(limits.probe_limit_s)
    digest = hashlib.blake2b(msgspec.msgpack.encode(prepared), digest_size=8).digest()
    slowest_s = probe(compiled, vocabulary, int.from_bytes(digest, "big"), limits.fill_limit_s)
    return Vetted(prepared, compiled.size_bytes, compile_s, slowest_s)


def _arm_timer(cpu_s: float) -> None:
    """Has the kernel end this process by SIGPROF after so many seconds of CPU, wherever it is."""
    signal.setitimer(signal.ITIMER_PROF, max(cpu_s, 0.001))


def _lower(limit: int, value: int) -> None:
    soft, hard = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY or value < soft:
        resource.setrlimit(limit, (value, hard))
