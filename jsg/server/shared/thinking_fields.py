"""The fields in which clients say how long a model thinks, and what is shown of its thoughts."""

import dataclasses
from collections.abc import Iterable, Mapping, Set
from typing import Any, Literal, final

from pydantic import Field

from jsg.errors import RequestError
from jsg.server.http.body import Body
from jsg.server.http.field_rules import FieldRules
from jsg.server.shared.harmless import NOT_READ
from jsg.speech.prompts.chat_template import ChatTemplate
from jsg.speech.reply_plan import ReplyPlan
from jsg.speech.rules.thinking import NO_THOUGHTS, Effort, ThoughtWish

EFFORT = (
    "How much the model thinks, where its chat template reads this. `none` turns thoughts off and other values turn "
    "them on, where the template can do that."
)
BUDGET = "The most tokens of thoughts. Then their end marker is written, and the answer begins. -1 is no limit."


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What one field of a request asks of thoughts.

    Attributes:
        wish: What it asks for.
        is_met: Whether it has an effect on each model that thinks, whatever the template reads.
        is_met_without: Whether a model that does not think does what it asks for.
    """

    wish: ThoughtWish
    is_met: bool = False
    is_met_without: bool = False


class Thinking(Body):
    """Whether the model thinks, and for how long."""

    type: Literal["disabled", "enabled", "adaptive"] = Field(
        description="Whether the model thinks, where its chat template can turn that on and off. `adaptive` leaves it "
        "to the template."
    )
    budget_tokens: int | None = Field(None, ge=1, lt=2**31, description=BUDGET.removesuffix(" -1 is no limit."))
    display: Literal["summarized", "omitted"] | None = Field(
        None,
        description="With `omitted` no thoughts are shown; their block in /v1/messages has a signature only. "
        "`summarized` shows all of them.",
    )

    @property
    def wish(self) -> ThoughtWish:
        """What it says."""
        is_on = {"enabled": True, "disabled": False, "adaptive": None}[self.type]
        is_shown = self.display != "omitted"
        return ThoughtWish(is_on, budget=self.budget_tokens, budget_field="thinking", is_shown=is_shown)

    @property
    def asked(self) -> Asked:
        """What it says, as one field."""
        is_off = self.type == "disabled"
        return Asked(self.wish, is_met=not is_off, is_met_without=is_off)


class Reasoning(Body):
    """How much the model thinks, as OpenRouter's clients write it in chat completions."""

    effort: Effort | None = Field(None, description=EFFORT)
    max_tokens: int | None = Field(None, ge=-1, lt=2**31, description=BUDGET)
    enabled: bool | None = Field(None, description="Whether the model thinks.")
    exclude: bool | None = Field(None, description="Show no thoughts.")

    @property
    def wish(self) -> ThoughtWish:
        """What it says."""
        return ThoughtWish(
            self.enabled, self.effort, self.max_tokens, budget_field="reasoning", is_shown=self.exclude is not True
        )

    @property
    def asked(self) -> Asked:
        """What it says, as one field."""
        is_of_template = self.effort is not None or self.enabled is False
        return Asked(self.wish, is_met=self.max_tokens is not None or self.exclude is True or not is_of_template)


def join_wishes(wishes: Iterable[ThoughtWish]) -> ThoughtWish:
    """One wish of those of several fields. Raises RequestError where two contradict each other."""
    wishes = list(wishes)
    budgets = {wish.budget: wish.budget_field for wish in wishes if wish.budget is not None}
    if len(budgets) > 1:
        first, second = list(budgets.values())[:2]
        raise RequestError(f"{second} must not contradict {first}, but the budgets differ; send one", second)
    for name, values in (
        ("reasoning_effort", {wish.effort for wish in wishes} - {None}),
        ("enable_thinking", {wish.is_on for wish in wishes} - {None}),
    ):
        if len(values) > 1:
            raise _contradiction(name)
    if any(wish.is_on for wish in wishes) and any(wish.effort == "none" for wish in wishes):
        raise _contradiction("reasoning_effort")
    [[budget, field]] = budgets.items() or [(None, "thinking_budget")]
    return ThoughtWish(
        is_on=next((wish.is_on for wish in wishes if wish.is_on is not None), None),
        effort=next((wish.effort for wish in wishes if wish.effort is not None), None),
        budget=None if budget == -1 else budget,
        budget_field=field,
        is_split=all(wish.is_split for wish in wishes),
        is_shown=all(wish.is_shown for wish in wishes),
        is_streamed=all(wish.is_streamed for wish in wishes),
    )


def template_wishes(
    plan: ReplyPlan, asked: Mapping[str, Asked], rules: FieldRules, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The variables of a chat template, those that ask for thoughts included.

    Args:
        plan: Has what the client wants of thoughts, and the model's template.
        asked: Fields that ask for something of thoughts.
        rules: Take note of those without an effect.
        given: The variables that the client gave by name.

    Raises:
        RequestError: A variable contradicts the wish; or the rules are strict, and a field has no effect.
    """
    given = given or {}
    wish, template, form = plan.wish, plan.speech.template, plan.speech.thinking
    _check_given(wish, template, given)
    for name, each in asked.items():
        if not (each.wish.template_kwargs(template, {}) or (each.is_met_without if form is None else each.is_met)):
            rules.pass_over(name, NO_THOUGHTS if form is None else NOT_READ)
    return {**given, **wish.template_kwargs(template, given)}


def switches(template: ChatTemplate) -> Set[str]:
    """The variables of a template that turn thoughts on and off."""
    return ThoughtWish(is_on=True).template_kwargs(template, {}).keys()


def _check_given(wish: ThoughtWish, template: ChatTemplate, given: Mapping[str, Any]) -> None:
    """Raises RequestError where a variable that a client gave by name contradicts the field of the same meaning."""
    for name in switches(template) & given.keys():
        if wish.is_on is not None and wish.is_on is not bool(given[name]):
            raise _contradiction("enable_thinking")
    if wish.effort is not None and given.get("reasoning_effort", wish.effort) != wish.effort:
        raise _contradiction("reasoning_effort")


def _contradiction(name: str) -> RequestError:
    return RequestError.of(name, "must not contradict another field of the request, but does; send one")
