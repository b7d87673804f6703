// Elements out of plain values. Text is always a text node: what tenants and errors say is never
// read as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...solid(children));
  return element;
}

const solid = (children) =>
  children.flat(2).filter((child) => child !== null && child !== undefined);

// Its place on an axis, as shares of the width.
export function placed(element, left, width) {
  element.style.left = `${clamp(left) * 100}%`;
  element.style.width = `${clamp(width) * 100}%`;
  return element;
}

export const clamp = (share) => (share > 0 ? Math.min(share, 1) : 0);

const shown = new WeakMap();

// Builds the children anew only when the value is another: nothing flickers, and a selection stays.
export function show(container, value, build) {
  const key = JSON.stringify(value);
  if (shown.get(container) === key) return;
  shown.set(container, key);
  container.replaceChildren(...solid([build(value)]));
}

// As many children as items, each kept as long as its key is there, so that focus and what is
// open stay. `update(child, item)` fills it.
export function keyed(container, items, keyOf, create, update) {
  const old = new Map([...container.children].map((child) => [child.dataset.key, child]));
  const children = items.map((item) => {
    const key = keyOf(item);
    let child = old.get(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    update(child, item);
    return child;
  });
  const isSame =
    children.length === container.children.length &&
    children.every((child, at) => child === container.children[at]);
  if (isSame) return;
  const focused = document.activeElement;
  container.replaceChildren(...children);
  if (focused && container.contains(focused)) focused.focus({ preventScroll: true });
}

export function hidden(text) {
  return h("span", { class: "hidden" }, text);
}
