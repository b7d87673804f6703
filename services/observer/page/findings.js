// What the doctor found: causes, evidence, what to change.

import { byId, h, keyed, show } from "./dom.js";
import { tight } from "./format.js";
import { sign } from "./sign.js";

export function showFindings(state, open) {
  const list = byId("findings");
  if (state.findings.length === 0) {
    list.replaceChildren(
      h(
        "p",
        { class: "none" },
        state.num_requests
          ? "Nothing. It looks at all requests that are kept, every few seconds."
          : "Nothing to look at yet.",
      ),
    );
    return;
  }
  keyed(
    list,
    state.findings,
    (finding) => finding.cause,
    (finding) =>
      h(
        "details",
        { open: finding === state.findings[0] },
        h("summary"),
        h("div", { class: "body" }),
      ),
    (row, finding) => {
      row.className = `finding ${finding.severity}`;
      show(row.firstChild, finding.summary, () => [
        sign(finding.severity),
        h("span", {}, tight(finding.summary)),
      ]);
      show(row.lastChild, finding, () => findingBody(finding, open));
    },
  );
}

function findingBody(finding, open) {
  return [
    h(
      "table",
      { class: "wide" },
      h(
        "tbody",
        {},
        finding.evidence.map(({ name: what, value, threshold }) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, what),
            h(
              "td",
              {},
              tight(value),
              threshold ? h("small", {}, `  counts from ${tight(threshold)}`) : null,
            ),
          ),
        ),
      ),
    ),
    finding.setting
      ? h(
          "p",
          { class: "todo" },
          "Change ",
          h("code", {}, `${finding.setting}: ${finding.before} → ${finding.after}`),
        )
      : null,
    h("p", { class: "todo" }, "Expected: ", tight(finding.expected)),
    finding.trace_ids.length
      ? h(
          "p",
          { class: "traces" },
          "Seen in ",
          finding.trace_ids.map((id) =>
            h(
              "button",
              { type: "button", class: "as-link", onclick: () => open(id) },
              id.slice(0, 8),
            ),
          ),
        )
      : null,
  ];
}
