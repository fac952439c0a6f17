// Markdown → elements: headings, paragraphs, lists, quotes, tables, code, and what stands within a line. HTML, and
// everything else that it does not know, stays the text that it is. Elements are made by dom.js only, so nothing that a
// model writes becomes code. A picture of another server is shown as a link, because the page loads nothing from there.

import { copied } from "./dialogs.js";
import { button, h, replace } from "./dom.js";

const MOST_LEVELS = 12; // lists and quotes within each other; what lies deeper is a paragraph
const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|[ \t]+|$)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const LINK = /^\[([^\]\n]*)\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"\n]*")?\s*\)/;
const ADDRESS = /^(?:https?:\/\/|mailto:)[^\s<>"'`]*[^\s<>"'`.,:;!?)\]*_~]/i;
const SAFE = /^(?:https?:\/\/|mailto:)/i; // an address that could run code is text
const ESCAPED = /[!-/:-@[-`{-~]/;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

const drawn = new WeakMap(); // element → its blocks, as they were drawn last

/**
 * Shows a text in an element. Blocks that have not changed since the last call stay, so a growing text costs little, and
 * what a reader has selected in it stays selected.
 */
export function showMarkdown(element, text) {
  const before = drawn.get(element) ?? [];
  const now = blocksOf(text.split(/\r?\n/)).map(({ lines, make }, index) => {
    const source = lines.join("\n");
    const same = before[index]?.source === source;
    return { source, node: same ? before[index].node : make(0) };
  });
  drawn.set(element, now);
  const first = now.findIndex(({ node }, index) => before[index]?.node !== node);
  const kept = first < 0 ? now.length : first;
  while (element.childNodes.length > kept) element.lastChild.remove();
  element.append(...now.slice(kept).map(({ node }) => node));
}

/** The blocks of some lines, each with its lines and a function that makes its element at a depth. */
function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const [end, make] = blockAt(lines, at);
    blocks.push({ lines: lines.slice(at, end), make });
    at = end;
  }
  return blocks;
}

/** The end of the block that begins at a line, and the function that makes its element. */
function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeAt(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [at + 1, () => h(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2] ?? ""))];
  if (RULE.test(line)) return [at + 1, () => h("hr")];
  if (QUOTE.test(line)) return quoteAt(lines, at);
  if (ITEM.test(line)) return listAt(lines, at);
  if (isTable(lines, at)) return tableAt(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !interrupts(lines, end)) end += 1;
  return [end, () => paragraph(lines.slice(at, end))];
}

function interrupts(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  const begins = item !== null && line.length > item[0].length && /^(?:[-*+]|1[.)])$/.test(item[2]);
  return begins || [FENCE, HEADING, RULE, QUOTE].some((kind) => kind.test(line)) || isTable(lines, at);
}

function paragraph(lines) {
  return h("p", {}, inline(lines.map((line) => line.trim()).join("\n")));
}

function codeAt(lines, at, [, indent, marks, info]) {
  const closes = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closes.test(lines[end])) end += 1;
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const text = lines.slice(at + 1, end).map((line) => line.replace(strip, "")).join("\n");
  return [Math.min(end + 1, lines.length), () => codeBlock(text, info.trim().split(/\s/)[0])];
}

function codeBlock(text, language) {
  const code = h("pre", { class: "code", tabindex: "0" }, text);
  const copy = button("Copy", async () => replace(copy, (await copied(code)) ? "Copied" : "Selected"), {
    "aria-label": "Copy the code",
  });
  return h("div", { class: "fenced" }, h("div", { class: "row" }, h("span", {}, language), copy), code);
}

function quoteAt(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && (QUOTE.test(lines[end]) || !interrupts(lines, end))) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [end, (depth) => h("blockquote", {}, within(inner, depth))];
}

/** The elements of lines inside a list or a quote. */
function within(lines, depth) {
  if (depth >= MOST_LEVELS) return [paragraph(lines)];
  return blocksOf(lines).map(({ make }) => make(depth + 1));
}

function listAt(lines, at) {
  const [, , first] = ITEM.exec(lines[at]);
  const kind = first.at(-1);
  const items = [];
  let end = at;
  for (let item = ITEM.exec(lines[end]); item && item[2].at(-1) === kind; item = ITEM.exec(lines[end] ?? "")) {
    if (RULE.test(lines[end])) break;
    const indent = item[1].length + item[2].length + (item[3]?.length ?? 1);
    const inner = [lines[end].slice(item[0].length)];
    for (end += 1; end < lines.length && belongs(lines, end, indent); end += 1) inner.push(unindented(lines[end], indent));
    items.push(inner);
    while (lines[end]?.trim() === "" && ITEM.exec(lines[end + 1] ?? "")?.[2].at(-1) === kind) end += 1;
  }
  const isNumbered = /\d/.test(first);
  const start = isNumbered && Number.parseInt(first, 10) !== 1 ? Number.parseInt(first, 10) : null;
  const make = (depth) => h(isNumbered ? "ol" : "ul", { start }, items.map((inner) => h("li", {}, itemOf(inner, depth))));
  return [end, make];
}

/** Whether a line continues an item: it is indented, or carries on its paragraph, or is an empty line before such one. */
function belongs(lines, at, indent) {
  const line = lines[at];
  const isIndented = (other) => other !== undefined && other.trim() !== "" && other.search(/\S/) >= Math.min(indent, 2);
  if (line.trim() === "") return isIndented(lines[at + 1]) && lines[at + 1].search(/\S/) >= indent;
  return isIndented(line) || (lines[at - 1].trim() !== "" && !interrupts(lines, at) && !ITEM.test(line));
}

function unindented(line, indent) {
  return line.slice(Math.min(indent, Math.max(0, line.search(/\S/))));
}

/** An item of one paragraph has no element for it, so that short lists are tight. */
function itemOf(lines, depth) {
  const parts = within(lines, depth);
  const [first, ...rest] = parts;
  return first?.tagName === "P" ? [...first.childNodes, ...rest] : parts;
}

function isTable(lines, at) {
  const divider = lines[at + 1];
  if (divider === undefined || !lines[at].includes("|") || !DIVIDER.test(divider)) return false;
  return cells(lines[at]).length === cells(divider).length;
}

function tableAt(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim() !== "") end += 1;
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "mid" : "end") : null));
  const row = (line, tag) => {
    const found = cells(line);
    return h("tr", {}, sides.map((side, index) => h(tag, { class: side }, inline(found[index] ?? ""))));
  };
  const make = () => {
    const head = h("thead", {}, row(lines[at], "th"));
    const body = h("tbody", {}, lines.slice(at + 2, end).map((line) => row(line, "td")));
    return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", {}, head, body));
  };
  return [end, make];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** What stands within lines: code, emphasis, links. `open` has the marks that are open around the text. */
function inline(text, open = []) {
  const parts = [];
  const missing = new Set(); // marks that do not come again, so that each is looked for once
  let plain = "";
  let at = 0;
  const add = (node, length) => {
    if (plain) parts.push(plain);
    parts.push(node);
    plain = "";
    at += length;
  };
  while (at < text.length) {
    const found = specialAt(text, at, open, missing);
    if (found) {
      add(...found);
    } else if (text[at] === "\\" && ESCAPED.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      const next = text.slice(at + 1).search(/[\\`*_~[!<hHmM]/);
      const end = next < 0 ? text.length : at + 1 + next;
      plain += text.slice(at, end);
      at = end;
    }
  }
  return plain ? [...parts, plain] : parts;
}

/** The node that begins at a place, and the length of its text; null for a plain character. */
function specialAt(text, at, open, missing) {
  const char = text[at];
  if (char === "`") return codeSpan(text, at, missing);
  if (char === "[" && !open.includes("[")) return linkAt(text, at, at, open);
  if (char === "!" && text[at + 1] === "[") return linkAt(text, at + 1, at, open);
  if ("<hHmM".includes(char)) return addressAt(text, at, open);
  return "*_~".includes(char) ? emphasisAt(text, at, open, missing) : null;
}

function codeSpan(text, at, missing) {
  const marks = /^`+/.exec(text.slice(at))[0];
  if (missing.has(marks)) return [marks, marks.length];
  const closes = new RegExp(`(?<!\`)\`{${marks.length}}(?!\`)`, "g");
  closes.lastIndex = at + marks.length;
  const end = closes.exec(text)?.index;
  if (end === undefined) {
    missing.add(marks);
    return [marks, marks.length];
  }
  const inner = text.slice(at + marks.length, end);
  const code = /^ .*[^ ].* $|^ [^ ] $/s.test(inner) ? inner.slice(1, -1) : inner;
  return [h("code", {}, code), end + marks.length - at];
}

function linkAt(text, at, from, open) {
  const [whole, name, address] = LINK.exec(text.slice(at, at + 4096)) ?? [];
  if (whole === undefined || !SAFE.test(address)) return null;
  return [link(address, name ? inline(name, [...open, "["]) : address), at - from + whole.length];
}

function addressAt(text, at, open) {
  if (open.includes("[")) return null;
  const isBracketed = text[at] === "<";
  if (!isBracketed && /\w/.test(text[at - 1] ?? "")) return null;
  const address = ADDRESS.exec(text.slice(at + Number(isBracketed), at + 4096))?.[0];
  if (address === undefined || (isBracketed && text[at + 1 + address.length] !== ">")) return null;
  return [link(address, address), address.length + 2 * Number(isBracketed)];
}

function link(href, children) {
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

function emphasisAt(text, at, open, missing) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || open.includes(mark) || missing.has(mark)) continue;
    const begin = at + mark.length;
    // Within a word `_` is a part of a name; a mark before a blank opens nothing.
    if (/\s/.test(text[begin] ?? " ") || (mark[0] === "_" && /\w/.test(text[at - 1] ?? ""))) continue;
    const end = closing(text, begin, mark);
    if (end === null) {
      missing.add(mark);
      continue;
    }
    return [h(tag, {}, inline(text.slice(begin, end), [...open, mark])), end + mark.length - at];
  }
  return null;
}

/** Where a mark closes what it has opened; null if it does not. */
function closing(text, begin, mark) {
  for (let end = text.indexOf(mark, begin + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (/[\s\\]/.test(text[end - 1])) continue;
    if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) {
      if (text[end + 1] === mark) end += 1;
      continue;
    }
    while (mark.length === 2 && text[end + 2] === mark[0]) end += 1; // the last two of three
    if (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? "")) continue;
    return end;
  }
  return null;
}
