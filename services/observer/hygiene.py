"""Which text that changes breaks which prefixes, and the hit rate without it. Pure.

    report(window, prompt_store.snapshot(), spelling=..., show_text=False) -> dict

It compares and replays up to MOST_PROMPTS prompts, which takes a second or two: call it in a
thread. The hit rate is of prompt tokens. It comes from a model of the workers' caches, which is
first asked for the hit rate as it was: where that is not what was measured, the report says so.
Prompt text is in it only with `show_text`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from services.core.tokens import TokenArray
from services.observer.changing import sight
from services.observer.families import Site, Span, find_spans
from services.observer.kinds import Form, Kind, Sight, name_form
from services.observer.model import Window
from services.observer.past import Past, read_past
from services.observer.prompts import Prompts
from services.observer.replaying import FAITHFUL_WITHIN, CacheModel
from services.observer.spelling import Spelling

MOST_PROMPTS = 2000
# With fewer requests nothing is said.
MIN_PROMPTS = 10
# What has fewer values than this, or for fewer of the prompts, hardly breaks a prefix.
MIN_VALUES, MIN_VALUES_SHARE = 2, 0.05
# Sites that are told, and replayed by themselves.
MOST_SITES = 10
MOST_SIGHTS = 32
MOST_VALUES = 3
_ADVICE = {
    Kind.TIME_STAMP: "move the time behind what does not change, or round it",
    Kind.COUNTER: "move the counter behind what does not change",
    Kind.UUID: "leave the id out of the prompt, or move it to its end",
    Kind.NONCE: "leave it out of the prompt, or move it to its end",
    Kind.TEXT: "move it behind what does not change",
}


class Found(NamedTuple):
    """A site, the prompts that have it, and what it is."""

    site: Site
    # Prompt's number to its span.
    spans: Mapping[int, Span]
    num_values: int
    sights: tuple[Sight, ...]
    form: Form | None

    @property
    def lost_tokens(self) -> int:
        """Behind the site, what prompts have in common with others, up to the next place."""
        return sum(span.agreed_behind for span in self.spans.values())

    @property
    def kind(self) -> Kind | None:
        return self.form.kind if self.form is not None else None


def report(
    window: Window,
    prompts: Prompts,
    *,
    spelling: Spelling | None = None,
    show_text: bool = False,
    cache_blocks: int | None = None,
) -> dict[str, Any]:
    """`cache_blocks`: of each worker; None: enough that nothing is evicted."""
    past = _replayable(window, prompts)
    document = _figures(past)
    if len(past) < MIN_PROMPTS:
        note = f"not enough evidence: {len(past)} answered requests, and {MIN_PROMPTS} are needed"
        return document | {"changes": [], "notes": [note]}
    token_ids = [each.prompt.token_ids for each in past]
    block_tokens = past[-1].prompt.block_tokens
    spans = find_spans(token_ids, block_tokens=block_tokens)
    found = _sites(past, token_ids, spans, spelling)
    # What was cached before the first of them is not known: the first half fills the caches.
    is_cut = prompts.has_forgotten or len(past) == MOST_PROMPTS
    model = CacheModel(
        past,
        token_ids,
        _by_prompt(found),
        cache_blocks=cache_blocks,
        first_counted=len(past) // 2 if is_cut else 0,
    )
    before = model.hit_rate(())
    # Words that change are a question, not a stamp: they can be moved, and not left out.
    removable = [each.site for each in found if each.kind is not Kind.TEXT]
    told = sorted(found, key=lambda each: -each.lost_tokens)[:MOST_SITES]
    measured = model.measured()
    document |= {
        "hit_rate": round(measured, 4),
        "model_hit_rate": round(before, 4),
        "faithful": abs(measured - before) <= FAITHFUL_WITHIN,
        "predicted_hit_rate": round(model.predicted(removable, before, measured), 4),
        "changes": [
            _describe(each, past, token_ids, model, before, measured, spelling, show_text)
            for each in told
        ],
        "notes": _notes(measured, before, prompts, spelling, past),
    }
    return document


def _replayable(window: Window, prompts: Prompts) -> list[Past]:
    """Answered requests whose prompts are known whole, the newest."""
    past = [
        each
        for each in read_past(window, prompts)
        if each.request is not None and each.had_kv_s is not None and each.prompt.is_whole
    ]
    return past[-MOST_PROMPTS:]


def _figures(past: Sequence[Past]) -> dict[str, Any]:
    tokens = sum(each.request.prompt_tokens for each in past if each.request)
    cached = sum(each.request.cached_tokens for each in past if each.request)
    return {
        "requests": len(past),
        "prompt_tokens": tokens,
        "cached_tokens": cached,
        "hit_rate": round(cached / tokens, 4) if tokens else None,
        "model_hit_rate": None,
        "faithful": None,
        "predicted_hit_rate": None,
    }


def _sites(
    past: Sequence[Past],
    token_ids: Sequence[TokenArray],
    spans: Sequence[Sequence[Span]],
    spelling: Spelling | None,
) -> list[Found]:
    """Those with more than one value."""
    by_site: dict[Site, dict[int, Span]] = defaultdict(dict)
    for number, found in enumerate(spans):
        for span in found:
            by_site[span.site][number] = span
    sites = []
    for site, having in by_site.items():
        values = {token_ids[n][span.start : span.end].tobytes() for n, span in having.items()}
        if len(values) < max(MIN_VALUES, MIN_VALUES_SHARE * len(having)):
            continue  # a date breaks prefixes once a day
        sights: tuple[Sight, ...] = ()
        if spelling is not None:
            some = [(n, span) for n, span in having.items() if span.end > span.start]
            sights = tuple(
                sight(token_ids[n], span.start, span.end, past[n].arrived_s, spelling)
                for n, span in some[-MOST_SIGHTS:]
            )
        form = name_form(sights) if sights else None
        if form is not None and spelling is not None:
            having = {n: _widened(span, form, token_ids[n], spelling) for n, span in having.items()}
        sites.append(Found(site, having, len(values), sights, form))
    return sites


def _by_prompt(found: Sequence[Found]) -> dict[int, list[Span]]:
    """In the order of their starts."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for each in found:
        for number, span in each.spans.items():
            spans[number].append(span)
    for of_one in spans.values():
        of_one.sort(key=lambda each: each.start)
    return spans


def _widened(span: Span, form: Form, token_ids: TokenArray, spelling: Spelling) -> Span:
    """All of a time stamp, of which only the seconds may have changed."""
    around = sight(token_ids, span.start, span.end, 0.0, spelling)
    first, last = form.locate(around)
    start, end = span.start, span.end
    while start > 0 and len(spelling.text(token_ids[start : span.start])) < (
        len(around.before) - first
    ):
        start -= 1
    while end < len(token_ids) and len(spelling.text(token_ids[span.end : end])) < (
        last - len(around.before) - len(around.text)
    ):
        end += 1
    return span._replace(start=start, end=end)


def _describe(
    found: Found,
    past: Sequence[Past],
    token_ids: Sequence[TokenArray],
    model: CacheModel,
    before: float,
    measured: float,
    spelling: Spelling | None,
    show_text: bool,
) -> dict[str, Any]:
    number, span = max(found.spans.items(), key=lambda each: (each[1].end > each[1].start, each[0]))
    place = spelling.place(token_ids[number], span.start) if spelling is not None else None
    last = spelling.place(token_ids[number], span.end) if spelling is not None else None
    alone = model.predicted((found.site,), before, measured)
    described: dict[str, Any] = {
        "kind": found.kind.value if found.kind is not None else None,
        "requests": len(found.spans),
        "values": found.num_values,
        # In the request of `trace_id`.
        "trace_id": past[number].prompt.trace_id,
        "start_token": span.start,
        "end_token": span.end,
        "message": place.message if place is not None else None,
        "role": place.role if place is not None else "",
        "character": place.character if place is not None else None,
        "end_character": last.character if last is not None else None,
        "tokens_behind": span.agreed_behind,
        "lost_tokens": found.lost_tokens,
        "predicted_hit_rate_alone": round(alone, 4),
        "advice": _ADVICE[found.kind or Kind.TEXT],
    }
    if found.form is not None and show_text:
        latest = found.sights[-1]
        whole = latest.before + latest.text + latest.after
        start, end = found.form.locate(latest)
        described["before"], described["after"] = whole[:start], whole[end:]
        described["examples"] = [found.form.cut_out(each) for each in found.sights[-MOST_VALUES:]]
    return described


def _notes(
    measured: float,
    before: float,
    prompts: Prompts,
    spelling: Spelling | None,
    past: Sequence[Past],
) -> list[str]:
    notes = []
    if abs(measured - before) > FAITHFUL_WITHIN:
        notes.append(
            f"the model has a hit rate of {before:.1%} where {measured:.1%} was measured: caches"
            " were too small, or requests came too close to each other; take the prediction with"
            " care"
        )
    if prompts.has_forgotten or len(past) == MOST_PROMPTS:
        notes.append(
            f"rates are those of the newer half of {len(past)} requests: what was cached before"
            " the older half is not known"
        )
    if spelling is None:
        notes.append("the model's vocabulary is not here: positions are tokens, without kinds")
    return notes
