// Makes elements. Every text becomes a text node, so what a model, a file name or an error says is never read as HTML.

const PROPERTIES = new Set(["value", "checked", "selected", "disabled", "hidden", "open", "indeterminate"]);
const SVG = "http://www.w3.org/2000/svg";

/**
 * Makes an element of HTML.
 * @param {string} name the tag
 * @param {object} props attributes; a function listens to the event of its name; false, null and undefined are left out
 * @param {...(Node|string|number|null|false|Array)} children
 */
export function h(name, props = {}, ...children) {
  return fill(document.createElement(name), props, children);
}

/** The same for SVG. */
export function svg(name, props = {}, ...children) {
  return fill(document.createElementNS(SVG, name), props, children);
}

/** Puts children in the place of those that a node has. */
export function replace(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter(isChild).map(asNode));
  return node;
}

/** A button with a text, or with a sign and the label that a screen reader reads for it. */
export function button(text, click, props = {}) {
  return h("button", { type: "button", click, ...props }, text);
}

let numIds = 0;

/** An id that no other element has. */
export function freshId(prefix) {
  numIds += 1;
  return `${prefix}-${numIds}`;
}

function fill(element, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined) continue;
    if (typeof value === "function") {
      element.addEventListener(key, value);
    } else if (PROPERTIES.has(key)) {
      element[key] = value;
    } else if (value !== false) {
      element.setAttribute(key, value === true ? "" : String(value));
    }
  }
  replace(element, children);
  return element;
}

function isChild(child) {
  return child !== null && child !== undefined && child !== false;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}
