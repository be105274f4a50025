"""What a request must look like that goes on where ranks that are gone left it."""

from __future__ import annotations

from runtime.messages import Resume
from runtime.request_builder import Request
from runtime.request_error import RequestError


def check_resume(resume: Resume, request: Request) -> None:
    """Returns if a request can go on from there.

    Raises:
        RequestError: What is said of its progress does not fit it.
    """
    length = len(request.prompt_token_ids)
    if resume.settled.prompt_tokens != length:
        raise _misfit(f"its prompt had {resume.settled.prompt_tokens} tokens and has {length} now")
    if len(resume.choices) != request.params.n:
        raise _misfit(f"{len(resume.choices)} choices are told of, the request has {request.params.n}")
    for index, choice in enumerate(resume.choices):
        if len(choice.token_ids) > request.max_tokens:
            raise _misfit(f"choice {index} has {len(choice.token_ids)} tokens of at most {request.max_tokens}")
    if resume.prompt_tokens >= length:
        raise _misfit(f"{resume.prompt_tokens} tokens behind the first are told of, the prompt has {length}")


def _misfit(message: str) -> RequestError:
    return RequestError(f"the request cannot be resumed: {message}", "resume", "internal_error")
