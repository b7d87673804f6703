"""Why a request's prompt was not in a cache: where it left what was, and one cause. Pure.

    known = prompt_store.snapshot()   # PromptStore, fed with Prompt and Eviction messages
    explain(trace_id, window, known, spelling=Spelling.load(model), show_text=False) -> dict

It takes some tens of milliseconds: call it in a thread. UnknownTrace is HTTP's 404. Without a
spelling (the model's files are not here) positions are in tokens, and kinds have no names.
Prompt text is in the answer only with `show_text` (the setting observer.show_text).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from services.observer.causes import Case, Cause, Finding, of_other_roots, of_the_caches
from services.observer.changing import (
    CONTEXT_TOKENS,
    Change,
    find_change,
    most_alike,
    nearest,
)
from services.observer.kinds import Kind
from services.observer.model import Request, Window
from services.observer.past import Past, read_past
from services.observer.prompts import KeptPrompt, Prompts
from services.observer.spelling import Place, Spelling

# A prefix of a trace id, so long, is enough.
MIN_ID_DIGITS = 6
MOST_VALUES = 5


class UnknownTrace(LookupError):
    """No such request is kept; the message says for how long they are."""


class _Parting(NamedTuple):
    """Where the prompt leaves the nearest earlier one."""

    past: Past | None
    token: int


def explain(
    trace_id: str,
    window: Window,
    prompts: Prompts,
    *,
    spelling: Spelling | None = None,
    show_text: bool = False,
) -> dict[str, Any]:
    """`trace_id`: or the id of a span in it. Raises UnknownTrace."""
    request = _find(trace_id, window)
    past = read_past(window, prompts)
    own = next((each for each in past if each.request is request), None)
    document = _figures(request)
    if own is None:
        return document | _told(_untold(request))
    earlier = [each for each in past if each.arrived_s < own.arrived_s]
    block_tokens = own.prompt.block_tokens
    case = Case(
        own,
        request,
        earlier,
        prompts,
        _workers(window, past, own.arrived_s),
        _store_id(window, request.worker_id),
        request.cached_tokens // block_tokens,
        max(0, request.prompt_tokens - 1) // block_tokens,
    )
    document |= {
        "block_tokens": block_tokens,
        "reusable_tokens": case.usable_blocks * block_tokens,
        "compared_prompts": len(earlier),
    }
    parting = _Parting(*nearest(own.prompt, earlier))
    change = _change(case, parting, spelling)
    where = _Reader(own.prompt, spelling)
    findings = _findings(case, parting, change, where)
    document |= _told(findings[0])
    document["also"] = [_told(finding) for finding in findings[1:]]
    document["difference"] = _difference(case, parting, spelling, show_text=show_text)
    if change is not None:
        document["change"] = _describe(change, where, show_text=show_text)
    return document


def _find(trace_id: str, window: Window) -> Request:
    wanted = trace_id.strip().lower()
    found = [each for each in window.requests if each.trace_id == wanted]
    if not found:
        found = [each for each in window.requests if wanted in {h.span_id for h in each.hops}]
    if not found and len(wanted) >= MIN_ID_DIGITS:
        found = [each for each in window.requests if each.trace_id.startswith(wanted)]
    if not found:
        raise UnknownTrace(
            f"no request {wanted[:40]} among the {len(window.requests)} of the last"
            f" {window.duration_s / 60:.0f} minutes: it is older (observer.window_minutes), still"
            " running, or was not answered by this mesh"
        )
    if len({each.trace_id for each in found}) > 1:
        raise UnknownTrace(f"{len(found)} requests begin with {wanted}: give more digits")
    # Of several in one trace, the one that had most to compute.
    return max(found, key=lambda each: each.prompt_tokens - each.cached_tokens)


def _workers(window: Window, past: Sequence[Past], at_s: float) -> set[str]:
    """Those that are in the mesh, or answered a request that was not over then."""
    answering = {each.worker_id for each in past if each.ended_s > at_s}
    return answering | {member.id for member in window.members}


def _store_id(window: Window, worker_id: str) -> str:
    """A worker uses that of its own host, or else the only one. "" where that says nothing."""
    stores = [each for each in window.members if each.role == "kvstore"]
    if len(stores) > 1:
        hosts = {each.host for each in window.members if each.id == worker_id}
        stores = [each for each in stores if each.host in hosts]
    return stores[0].id if len(stores) == 1 else ""


def _figures(request: Request) -> dict[str, Any]:
    return {
        "trace_id": request.trace_id,
        "model": request.model,
        "tenant": request.tenant,
        "worker_id": request.worker_id,
        "strategy": request.strategy,
        "ttft_ms": None if request.ttft_s is None else round(request.ttft_s * 1e3, 3),
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "predicted_tokens": request.predicted_tokens,
        "failed_with": request.error,
    }


def _told(finding: Finding) -> dict[str, Any]:
    return {**finding._asdict(), "cause": finding.cause.value, "evidence": list(finding.evidence)}


def _untold(request: Request) -> Finding:
    if not request.prompt_tokens:
        summary = "it failed before its prompt was routed: there was nothing to look up"
        return Finding(Cause.UNKNOWN, summary, 0, (request.error,) if request.error else ())
    summary = "its tokens have not been told, or are forgotten: nothing can be compared"
    return Finding(Cause.UNKNOWN, summary, request.prompt_tokens - request.cached_tokens)


def _change(case: Case, parting: _Parting, spelling: Spelling | None) -> Change | None:
    """Only among those that share its keys could it have hit."""
    own = case.past.prompt
    if parting.token >= len(own.token_ids):
        return None
    others = [each for each in case.earlier if each.prompt.root == own.root]
    alike = most_alike(own.token_ids, others)
    return find_change(case.past, parting.token, alike, spelling)


def _findings(
    case: Case, parting: _Parting, change: Change | None, where: _Reader
) -> list[Finding]:
    """The one that lost most tokens first; never none."""
    lost = (case.usable_blocks - case.cached_blocks) * case.block_tokens
    if not case.usable_blocks:
        summary = (
            f"a prompt of {case.request.prompt_tokens} tokens has no full block of"
            f" {case.block_tokens} before its last token: nothing of it can be reused"
        )
        return [Finding(Cause.SHORTER_THAN_A_BLOCK, summary, 0)]
    if lost <= 0:
        return [Finding(Cause.HIT, "all that could be reused was in a cache", 0)]
    found = [of_the_caches(case), of_other_roots(case), _of_change(case, change, where)]
    findings = [each for each in found if each is not None and each.lost_tokens > 0]
    findings.sort(key=lambda each: -each.lost_tokens)
    return findings or [_first_of_its_kind(case, parting, lost)]


def _of_change(case: Case, change: Change | None, where: _Reader) -> Finding | None:
    """Text that others have too stands behind text that only this prompt has."""
    if change is None:
        return None
    size = case.block_tokens
    lost = (change.start + change.agreed_behind) // size - max(
        change.start // size, case.cached_blocks
    )
    if lost <= 0:
        return None
    lost_tokens = min(lost * size, case.lost_tokens(case.usable_blocks))
    place = where.describe(change)
    what = f"a {change.kind.value}" if change.kind is not Kind.TEXT else "text that changes"
    summary = (
        f"{what} in {place} is different in each of {change.num_compared + 1} prompts that are"
        f" alike; {change.agreed_behind} tokens behind it are the same"
        if change.num_values == change.num_compared + 1
        else f"{what} in {place} has {change.num_values} values in {change.num_compared + 1}"
        f" prompts that are alike; {change.agreed_behind} tokens behind it are the same"
    )
    evidence = [f"tokens {change.start} to {change.end} of the prompt change"]
    if change.num_more:
        evidence.append(f"{change.num_more} more places behind it change too")
    return Finding(Cause.CHANGING_TEXT, summary, lost_tokens, tuple(evidence))


def _first_of_its_kind(case: Case, parting: _Parting, lost: int) -> Finding:
    size = case.block_tokens
    among = f"{len(case.earlier)} earlier prompts"
    if not case.past.prompt.is_whole:
        summary = "not all of its tokens have been told: nothing behind its known part is compared"
        return Finding(Cause.UNKNOWN, summary, lost)
    evidence = ("older prompts are forgotten",) if case.prompts.has_forgotten else ()
    if not case.cached_blocks and 0 < parting.token < size:
        summary = (
            f"what it shares with any of {among}, {parting.token} tokens, is shorter than a block"
            f" of {size}"
        )
        return Finding(Cause.SHORTER_THAN_A_BLOCK, summary, lost, evidence)
    summary = f"the first of its kind: none of {among} goes on like it"
    if parting.token:
        summary += f" behind token {parting.token}"
    return Finding(Cause.FIRST_OF_ITS_KIND, summary, lost, evidence)


class _Reader:
    """Says where something that changes is, as exactly as is known."""

    def __init__(self, prompt: KeptPrompt, spelling: Spelling | None) -> None:
        self._token_ids = prompt.token_ids
        self._spelling = spelling

    def place(self, change: Change) -> tuple[Place, int] | None:
        """Of all that has the form, and its last character; None without a spelling."""
        if self._spelling is None or change.form is None:
            return None
        place = self._spelling.place(self._token_ids, change.start)
        own = change.sights[0]
        first, last = change.form.locate(own)
        character = max(0, place.character + first - len(own.before))
        return place._replace(character=character), character + last - first

    def describe(self, change: Change) -> str:
        found = self.place(change)
        if found is None:
            return f"tokens {change.start} to {change.end}"
        place, end = found
        characters = f"characters {place.character} to {end}"
        if place.message is None:
            return f"{characters} of the text"
        return f"message {place.message} ({place.role}), {characters}"


def _difference(
    case: Case, parting: _Parting, spelling: Spelling | None, *, show_text: bool
) -> dict[str, Any] | None:
    """The first token that the nearest earlier prompt has not; None without one."""
    if parting.past is None:
        return None
    own, other, token = case.past.prompt, parting.past.prompt, parting.token
    found = {
        "nearest_trace_id": other.trace_id,
        "nearest_ago_s": round(case.past.arrived_s - parting.past.arrived_s, 1),
        "shared_tokens": token,
        "token": token,
        "block": token // case.block_tokens,
        **_placed(own, token, spelling),
    }
    if spelling is not None and show_text:
        ids, other_ids = own.token_ids, other.token_ids
        found["before"] = spelling.text(ids[max(0, token - CONTEXT_TOKENS) : token])
        found["here"] = spelling.text(ids[token : token + CONTEXT_TOKENS])
        found["there"] = spelling.text(other_ids[token : token + CONTEXT_TOKENS])
    return found


def _placed(prompt: KeptPrompt, token: int, spelling: Spelling | None) -> dict[str, Any]:
    place = Place(None, "", 0) if spelling is None else spelling.place(prompt.token_ids, token)
    return {
        "message": place.message,
        "role": place.role,
        "character": None if spelling is None else place.character,
    }


def _describe(change: Change, where: _Reader, *, show_text: bool) -> dict[str, Any]:
    place, end = where.place(change) or (None, None)
    found: dict[str, Any] = {
        "kind": change.form.kind.value if change.form is not None else None,
        "start_token": change.start,
        "end_token": change.end,
        "message": place.message if place is not None else None,
        "role": place.role if place is not None else "",
        "character": place.character if place is not None else None,
        "end_character": end,
        "agreed_tokens_behind": change.agreed_behind,
        "compared_prompts": change.num_compared,
        "values": change.num_values,
        "more_places_behind": change.num_more,
    }
    if change.form is not None and show_text:
        values = [change.form.cut_out(each) for each in change.sights[: 1 + MOST_VALUES]]
        found["text"], found["others"] = values[0], values[1:]
    return found
