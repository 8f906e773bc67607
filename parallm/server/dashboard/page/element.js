// Makes elements from data. Every string becomes a text node or an attribute of the list below: nothing is parsed.

const REFUSED = new Set(["script", "style", "iframe", "frame", "object", "embed", "link", "base", "meta", "form", "template"]);
const ATTRIBUTES = new Set(
  ("class id type name value for role tabindex title href rows cols min max step placeholder disabled checked selected open " +
    "hidden colspan scope dir datetime autocomplete spellcheck maxlength required low high " +
    "optimum list label download " +
    "d viewBox x y x1 x2 y1 y2 cx cy r width height points transform preserveAspectRatio").split(" "),
);
const OWN_ADDRESS = /^(#|\.\.\/v1\/)/;
const SVG = "http://www.w3.org/2000/svg";
// what hides, reorders or is half of a character; line ends and tabs stay
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]|\p{Cs}/gu;

const PILES = /(\p{M}{5})\p{M}+/gu; // marks upon marks, which would cover other lines

/** Return the text with characters that cannot be seen as their codes, such as U+202E. */
export function visible(text) {
  const string = String(text);
  return string.replace(PILES, "$1…").replace(UNSEEN, (found) => "U+" + found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"));
}

/** Return an element: h("p.note", { title: "..." }, "text", child, [more]). Attributes may be left out. */
export function h(tag, ...rest) {
  const [name, ...classes] = tag.split(".");
  if (REFUSED.has(name)) throw new TypeError(`the page makes no element ${name}`);
  return fill(document.createElement(name), classes, rest);
}

/** Return an element of SVG, by the rules of h. */
export function svg(tag, ...rest) {
  const [name, ...classes] = tag.split(".");
  if (REFUSED.has(name) || name === "foreignObject") throw new TypeError(`the page makes no element ${name}`);
  return fill(document.createElementNS(SVG, name), classes, rest);
}

function fill(element, classes, rest) {
  if (classes.length) element.setAttribute("class", classes.join(" "));
  if (isAttributes(rest[0])) setAttributes(element, rest.shift());
  add(element, rest);
  return element;
}

function isAttributes(value) {
  return value !== null && typeof value === "object" && !(value instanceof Node) && !Array.isArray(value);
}

/** Set attributes; null, undefined and false remove one, and a function under onNAME listens. */
export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function" && name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (!ATTRIBUTES.has(name) && !/^(data|aria)-[a-z-]+$/.test(name)) throw new TypeError(`the page sets no attribute ${name}`);
    else if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else if (name === "href" && !OWN_ADDRESS.test(value)) throw new TypeError("a link leads to the page's own addresses alone");
    else if (name === "class" && element.className && element instanceof HTMLElement) element.className += " " + value;
    else if (name === "value" && "value" in element) element.value = value;
    else element.setAttribute(name, value === true ? "" : name === "title" || name === "aria-label" ? visible(value) : value);
  }
}

function add(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(element, child);
    else if (child instanceof Node) element.append(child);
    else if (child !== null && child !== undefined && child !== false) element.append(document.createTextNode(visible(child)));
  }
}

/** Replace what the element holds. */
export function put(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

/** Set the text of an element where it differs, so that a selection and a screen reader are left alone. */
export function write(element, text) {
  const next = visible(text ?? "");
  if (element.textContent !== next) element.textContent = next;
  return element;
}

/** Bring the children of parent in line with items, keeping elements by key, so that focus and scrolling stay.

make(item) returns an element; update(element, item) changes one that exists already. */
export function keep(parent, items, key, make, update) {
  const before = new Map([...parent.children].map((child) => [child.itemKey, child]));
  let at = null;
  for (const item of items) {
    const name = String(key(item));
    let element = before.get(name);
    if (element) update?.(element, item);
    else {
      element = make(item);
      element.itemKey = name;
    }
    before.delete(name);
    const place = at ? at.nextSibling : parent.firstChild;
    if (place !== element) parent.insertBefore(element, place);
    at = element;
  }
  for (const element of before.values()) element.remove();
}
