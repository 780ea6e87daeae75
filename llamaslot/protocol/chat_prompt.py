"""From the body of a chat request to its prompt."""

from __future__ import annotations

from llamaslot.base.commands import TextPart
from llamaslot.base.errors import InvalidRequestError
from llamaslot.protocol.bodies import ChatBody
from llamaslot.text.template import ChatTemplate

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def rendered(template: ChatTemplate, body: ChatBody) -> tuple[TextPart, ...]:
    """Return the conversation as prompt parts; raises `InvalidRequestError` if it cannot be rendered."""
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidRequestError(
                f"'messages[{i}].role' must be one of {', '.join(sorted(_ROLES))}", param=f"messages[{i}].role"
            )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        kwargs["enable_thinking"] = False
    elif body.reasoning_effort:
        kwargs["reasoning_effort"] = body.reasoning_effort
    return template.render(body.messages, tools=body.tools, add_generation_prompt=_wants_reply(body), kwargs=kwargs)


def _wants_reply(body: ChatBody) -> bool:
    """Return True if the prompt ends where a reply of the assistant begins or, for its own message, continues."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        raise InvalidRequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other",
            param="continue_final_message",
        )
    if body.messages[-1]["role"] != "assistant":
        raise InvalidRequestError(
            "'continue_final_message' needs a last message of the assistant", param="continue_final_message"
        )
    return True
