"""The command line's options as types, shared by the commands that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from grammar_sync.spec import DEFAULT_MAX_WHITESPACE
from launch.options import LONGEST_KEPT_S, LONGEST_S

_ENGINE = "Engine"
_HTTP = "HTTP"
_NODES = "Nodes (passed on to torchrun)"
_SAMPLING = "Defaults for requests that do not say"
_GRAMMAR = "Grammar (at most one; for requests that have none)"

Input = Annotated[str | None, typer.Option("--input", help="JSONL file, one request a line; - reads stdin.")]


def _none_is_stdout(path: Path | None) -> Path | None:
    return None if path == Path("-") else path


Output = Annotated[Path | None, typer.Option(help="Where to write.", show_default="stdout", callback=_none_is_stdout)]
MetricsFile = Annotated[
    Path | None,
    typer.Option(help="Write the run's metrics at its end, in Prometheus' text format.", show_default="nowhere"),
]

Model = Annotated[
    Path | None,
    typer.Option(help="Hugging Face folder or GGUF file.", show_default="SmolLM2", rich_help_panel=_ENGINE),
]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of a stage.", rich_help_panel=_ENGINE)]
Pp = Annotated[int, typer.Option(min=1, help="Pipeline stages.", rich_help_panel=_ENGINE)]
PpLayers = Annotated[
    str | None, typer.Option(help="Layers of each stage, as 8,7.", show_default="balanced", rich_help_panel=_ENGINE)
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(
        help="auto = the checkpoint's own; on a CPU that is clearly slower in bfloat16, float32.",
        rich_help_panel=_ENGINE,
    ),
]
Products = Annotated[
    Literal["auto", "plain", "onednn"],
    typer.Option(
        help="How products with weights are computed on the CPU; auto = what a measurement at the start finds faster.",
        rich_help_panel=_ENGINE,
    ),
]
Invariant = Annotated[
    bool,
    typer.Option(
        "--invariant",
        help="The same bits at any --tp and --pp, in any batch, chunk and place, whatever is cached or preempted.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="auto = CUDA where there is one, else the CPU.", rich_help_panel=_ENGINE),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=2, help="Prompt and output together, in tokens.", show_default="the model's", rich_help_panel=_ENGINE
    ),
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Sequences that run at once.", rich_help_panel=_ENGINE)]
MaxBatchTokens = Annotated[
    int, typer.Option(min=1, help="Tokens of one step; longer prompts run in chunks.", rich_help_panel=_ENGINE)
]
KvCacheBytes = Annotated[
    int | None,
    typer.Option(min=1, help="KV cache of one rank.", show_default="from free memory", rich_help_panel=_ENGINE),
]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Reuse KV entries of tokens that begin another request too.",
        rich_help_panel=_ENGINE,
    ),
]
Speculate = Annotated[
    str | None,
    typer.Option(
        metavar="ngram:K",
        help="Guess up to K next tokens from what followed the same ones before, and check them at once.",
        show_default="off",
        rich_help_panel=_ENGINE,
    ),
]
GroupTimeout = Annotated[
    float,
    typer.Option(min=1, max=LONGEST_S, help="Seconds until a collective or message fails.", rich_help_panel=_ENGINE),
]
StartTimeout = Annotated[
    float, typer.Option(min=1, max=LONGEST_S, help="Seconds until all ranks must be up.", rich_help_panel=_ENGINE)
]
MaxRecoveries = Annotated[
    int,
    typer.Option(
        min=0,
        help="Faults of ranks that are survived within --recovery-window; 0 = the first ends the run.",
        rich_help_panel=_ENGINE,
    ),
]
RecoveryWindow = Annotated[
    float, typer.Option(min=1, max=LONGEST_S, help="Seconds in which --max-recoveries counts.", rich_help_panel=_ENGINE)
]
StallTimeout = Annotated[
    float,
    typer.Option(
        min=0.2,
        max=LONGEST_S,
        help="Seconds that a rank that decodes may give no sign of life.",
        rich_help_panel=_ENGINE,
    ),
]
FaultReportFile = Annotated[
    Path | None,
    typer.Option(
        help="Append a line of JSON for every fault of a rank: who, how, where, with stacks.",
        show_default="nowhere",
        rich_help_panel=_ENGINE,
    ),
]
GrammarTimeout = Annotated[
    float,
    typer.Option(min=0.1, max=LONGEST_S, help="Seconds of CPU a grammar may take to compile.", rich_help_panel=_ENGINE),
]
GrammarBackendChoice = Annotated[
    Literal["auto", "xgrammar", "llguidance"],
    typer.Option(help="Grammar engine; auto = the first that enforces all of a grammar.", rich_help_panel=_ENGINE),
]
GrammarMemoryBytes = Annotated[
    int, typer.Option(min=16 << 20, help="Memory that a grammar's compile may take.", rich_help_panel=_ENGINE)
]
GrammarCacheBytes = Annotated[
    int, typer.Option(min=0, help="Compiled grammars that a first-stage rank keeps.", rich_help_panel=_ENGINE)
]
GrammarCacheDir = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="Folder where it is kept from run to run which grammars can be used.",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
ReasoningMarker = Annotated[
    str | None,
    typer.Option(
        help="Text that ends the model's thinking, as </think>.",
        show_default="as the model's files have it",
        rich_help_panel=_ENGINE,
    ),
]
ReasoningStartMarker = Annotated[
    str | None,
    typer.Option(
        help="Text that begins the model's thinking.", show_default="what goes with the end", rich_help_panel=_ENGINE
    ),
]
ThreadsPerRank = Annotated[
    int | None,
    typer.Option(
        min=1, help="CPU threads of a rank.", show_default="cores ÷ ranks of the node", rich_help_panel=_ENGINE
    ),
]
PostCheck = Annotated[
    bool,
    typer.Option(
        "--post-check/--no-post-check",
        help="Validate finished JSON outputs against their schemas, in a process beside the leader.",
        rich_help_panel=_ENGINE,
    ),
]
LogitProcessors = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-processor",
        help="module:name of a logit processor that requests may name; may be given again.",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
Audit = Annotated[
    bool,
    typer.Option(
        "--audit",
        help="Every last-stage rank also draws by itself, from logits of all slices; a difference is an error.",
        rich_help_panel=_ENGINE,
    ),
]
AuditEvery = Annotated[
    int,
    typer.Option(
        min=0,
        help="In every N steps all ranks check weights, products and hidden states for wrong numbers.",
        show_default="never",
        rich_help_panel=_ENGINE,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Write what every rank does, as trace events for Perfetto.",
        show_default="nowhere",
        rich_help_panel=_ENGINE,
    ),
]

Host = Annotated[str, typer.Option(help="Address to bind; only this machine by default.", rich_help_panel=_HTTP)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to bind; 0 = any that is free.", rich_help_panel=_HTTP)]
ServedModelName = Annotated[
    str | None,
    typer.Option(help="What clients call the model.", show_default="its file's or folder's", rich_help_panel=_HTTP),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File with keys, one a line; clients must give one.",
        show_default="LOCKSTEP_API_KEY, else none is needed",
        rich_help_panel=_HTTP,
    ),
]
MaxRequests = Annotated[
    int, typer.Option(min=1, help="Prompts under way at once; more get 429.", rich_help_panel=_HTTP)
]
MaxPrompts = Annotated[int, typer.Option(min=1, help="Prompts of one request.", rich_help_panel=_HTTP)]
MaxBodyBytes = Annotated[int, typer.Option(min=1024, help="Bytes of a request.", rich_help_panel=_HTTP)]
JournalFolder = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        help="Folder in which requests with an Idempotency-Key, and their answers, outlive the server.",
        show_default="no journal",
        rich_help_panel=_HTTP,
    ),
]
JournalKeep = Annotated[
    float,
    typer.Option(
        min=1, max=LONGEST_KEPT_S, help="Seconds that an answer is kept in the journal.", rich_help_panel=_HTTP
    ),
]
JournalBytes = Annotated[
    int, typer.Option(min=1 << 20, help="Bytes kept in the journal; old answers go.", rich_help_panel=_HTTP)
]
StreamBuffer = Annotated[
    int, typer.Option(min=1, help="Messages that may wait for a slow reader of a stream.", rich_help_panel=_HTTP)
]
HealthTimeout = Annotated[
    float,
    typer.Option(
        min=1,
        max=LONGEST_S,
        help="Seconds that a rank may be silent, or in one step, before /health says no.",
        rich_help_panel=_HTTP,
    ),
]

Nnodes = Annotated[int, typer.Option(min=1, help="Nodes; run the same command on each.", rich_help_panel=_NODES)]
NodeRank = Annotated[
    int | None, typer.Option(min=0, help="This node, for --rdzv-backend static.", rich_help_panel=_NODES)
]
RdzvEndpoint = Annotated[str | None, typer.Option(help="host:port where the nodes meet.", rich_help_panel=_NODES)]
RdzvBackend = Annotated[Literal["c10d", "static"], typer.Option(rich_help_panel=_NODES)]
RdzvId = Annotated[str | None, typer.Option(help="The job's name.", rich_help_panel=_NODES)]

MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens to generate at most.", show_default="256, or what the context leaves", rich_help_panel=_SAMPLING
    ),
]
Temperature = Annotated[float | None, typer.Option(show_default="1", rich_help_panel=_SAMPLING)]
TopP = Annotated[float | None, typer.Option(show_default="1", rich_help_panel=_SAMPLING)]
TopK = Annotated[int | None, typer.Option(show_default="off", rich_help_panel=_SAMPLING)]
MinP = Annotated[float | None, typer.Option(show_default="0", rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(show_default="random", rich_help_panel=_SAMPLING)]
# Not --n: torchrun would take it for an abbreviation of its own --nnodes.
NumChoices = Annotated[
    int | None, typer.Option("-n", "--num-choices", help="Choices.", show_default="1", rich_help_panel=_SAMPLING)
]
EnableThinking = Annotated[
    bool | None,
    typer.Option(
        "--enable-thinking/--no-enable-thinking",
        help="Think before answering.",
        show_default="as the prompt has it",
        rich_help_panel=_SAMPLING,
    ),
]
ThinkingBudget = Annotated[
    int | None,
    typer.Option(help="Tokens of thinking at most.", show_default="no bound", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Stop string; may be given again.", show_default=False, rich_help_panel=_SAMPLING),
]
Logprobs = Annotated[
    int | None,
    typer.Option(help="Report each token's logprob and this many of the likeliest.", rich_help_panel=_SAMPLING),
]

AnyWhitespace = Annotated[
    bool | None,
    typer.Option(
        "--any-whitespace/--no-any-whitespace",
        help='Blanks and line ends between JSON tokens, or one form: ", " and ": ".',
        show_default="any",
        rich_help_panel=_SAMPLING,
    ),
]
MaxWhitespace = Annotated[
    int | None,
    typer.Option(
        help="Blanks between two JSON tokens at most.",
        show_default=str(DEFAULT_MAX_WHITESPACE),
        rich_help_panel=_SAMPLING,
    ),
]
MaxStringLength = Annotated[
    int | None,
    typer.Option(
        help="Characters of a JSON string whose schema sets no bound.",
        show_default="no bound",
        rich_help_panel=_SAMPLING,
    ),
]
MaxItems = Annotated[
    int | None,
    typer.Option(
        help="Items of a JSON array whose schema sets no bound.", show_default="no bound", rich_help_panel=_SAMPLING
    ),
]
EbnfRoot = Annotated[
    str | None,
    typer.Option(help="The rule that an EBNF starts at.", show_default="root", rich_help_panel=_SAMPLING),
]

JsonSchema = Annotated[
    str | None, typer.Option(help="JSON Schema, or a file that holds one.", rich_help_panel=_GRAMMAR)
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Any JSON object.", rich_help_panel=_GRAMMAR)]
Regex = Annotated[str | None, typer.Option(help="Regular expression for the whole output.", rich_help_panel=_GRAMMAR)]
Ebnf = Annotated[Path | None, typer.Option(help="File with a GBNF grammar.", rich_help_panel=_GRAMMAR)]
Choice = Annotated[
    str | None,
    typer.Option(help="Comma-separated list of outputs: yes,no. Blanks are part of them.", rich_help_panel=_GRAMMAR),
]
StructuralTag = Annotated[
    str | None, typer.Option(help="Structural tag (tool calls), or a file that holds one.", rich_help_panel=_GRAMMAR)
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Where to write every figure.", show_default="nowhere")]
