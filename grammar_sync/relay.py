"""Takes the first stage's verdict down the pipeline, so that all stages schedule the same requests."""

from __future__ import annotations

import msgspec

from grammar_sync.agreement import Verdict
from pp.link import StageLink, Tag


class RelayError(RuntimeError):
    """A verdict was missing, unreadable or of another step: the rank cannot go on."""


def relay_verdict(link: StageLink, verdict: Verdict | None) -> Verdict:
    """Returns this step's verdict on every stage.

    The first stage sends to the next without waiting; each later stage waits for the previous one and passes it on.
    What the first stage has to compile stays there: later stages need no more than ids.
    Every rank calls it once in each step that has a verdict. With one stage nothing is sent.

    Args:
        link: This rank's pipeline, in the verdict's step.
        verdict: The verdict on the first stage; None on later ones, which have no say.

    Raises:
        RelayError: The verdict is missing on the first stage, given on a later one, unreadable, or of another step.
        LinkError: The message failed, or was of another step.
    """
    if (verdict is None) == link.is_first:
        have = "no verdict to send" if link.is_first else "a verdict of its own"
        raise RelayError(f"verdict on {link.name}, step {link.step}: stage {link.stage} has {have}")
    if verdict is None:
        payload = link.receive_frame(link.stage - 1, Tag.VERDICT)
        try:
            verdict = msgspec.msgpack.decode(payload, type=Verdict)
        except msgspec.DecodeError as error:
            raise RelayError(
                f"verdict on {link.name} from stage {link.stage - 1}, step {link.step}: {error}"
            ) from error
    else:
        verdict = msgspec.structs.replace(verdict, vetted=())
        payload = msgspec.msgpack.encode(verdict)
    if verdict.step != link.step:
        raise RelayError(f"verdict on {link.name} at stage {link.stage}: got step {verdict.step}, expected {link.step}")
    if not link.is_last:
        link.send_frame(payload, link.stage + 1, Tag.VERDICT)
    return verdict
