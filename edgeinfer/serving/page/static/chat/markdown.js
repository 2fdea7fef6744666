// Markdown to DOM nodes. Every piece of text becomes a text node, so HTML in it stays text.

import { button, copyText, el } from "../dom.js";

const MAX_DEPTH = 8;
const MAX_INLINE = 8000; // characters of a block whose marks are read; longer ones are plain text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp(
  [
    /\\([\\`*_{}[\]()#+\-.!|~<>])/,
    /(?<ticks>`+)(?<code>[\s\S]*?[^`])\k<ticks>(?!`)/,
    /\*\*(?=\S)(?<strong>[\s\S]*?\S)\*\*/,
    /\*(?=[^\s*])(?<em>[\s\S]*?[^\s*])\*(?!\*)/,
    /(?<!\w)__(?=\S)(?<strong2>[\s\S]*?\S)__(?!\w)/,
    /(?<!\w)_(?=[^\s_])(?<em2>[\s\S]*?[^\s_])_(?!\w)/,
    /~~(?=\S)(?<del>[\s\S]*?\S)~~/,
    /!?\[(?<label>[^\]\n]*)\]\(\s*<?(?<address>[^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"\n]*")?\s*\)/,
    /<?(?<url>https?:\/\/(?:\([^\s<>()]*\)|[^\s<>"'`()\]])*(?:\([^\s<>()]*\)|[^\s<>"'`()\].,:;!?]))>?/,
    /(?<br>\n)/,
  ]
    .map((part) => part.source)
    .join("|"),
);

// Renders a text that grows: only blocks that changed are built again.
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  show(text) {
    const blocks = blocksOf(text.split("\n"));
    let same = 0;
    while (same < blocks.length && this.sources[same] === blocks[same].source) same++;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    blocks.slice(same).forEach((block) => this.node.append(built(block, 0)));
    this.sources = blocks.map((block) => block.source);
  }
}

// The blocks of lines: {kind, source, …}.
function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [block, end] = nextBlock(lines, at);
    blocks.push({ ...block, source: `${block.kind}\n${lines.slice(at, end).join("\n")}` });
    at = end;
  }
  return blocks;
}

function nextBlock(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeBlock(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) {
    const end = firstAfter(lines, at, (one) => !QUOTE.test(one));
    return [{ kind: "quote", lines: lines.slice(at, end).map((one) => one.replace(QUOTE, "")) }, end];
  }
  if (ITEM.test(line)) return listBlock(lines, at);
  if (isTable(lines, at)) {
    const end = firstAfter(lines, at + 2, (one) => !one.includes("|"));
    return [{ kind: "table", rows: [line, ...lines.slice(at + 2, end)].map(cellsOf) }, end];
  }
  const end = firstAfter(lines, at + 1, (one, index) => !one.trim() || startsBlock(lines, index));
  return [{ kind: "paragraph", text: lines.slice(at, end).join("\n").trim() }, end];
}

function firstAfter(lines, from, ends) {
  let at = from;
  while (at < lines.length && !ends(lines[at], at)) at++;
  return at;
}

const isTable = (lines, at) =>
  lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DELIMITERS.test(lines[at + 1]);

const startsBlock = (lines, at) =>
  [FENCE, HEADING, RULE, QUOTE, ITEM].some((mark) => mark.test(lines[at])) || isTable(lines, at);

function codeBlock(lines, at, [, mark, language]) {
  const closes = (one) => one.trim().startsWith(mark) && /^(`+|~+)$/.test(one.trim());
  const end = firstAfter(lines, at + 1, closes);
  return [{ kind: "code", language: language.trim(), text: lines.slice(at + 1, end).join("\n") }, Math.min(end + 1, lines.length)];
}

// A list: its items are lines with a mark of the same indent, with the deeper lines after each.
function listBlock(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== ordered || RULE.test(lines[end])) break;
    const width = item[1].length + item[2].length + 1;
    const begin = end;
    end = firstAfter(lines, end + 1, (one, index) => {
      if (!one.trim()) return !continues(lines, index, indent.length + 1);
      return leading(one) <= indent.length && (startsBlock(lines, index) || !lines[index - 1].trim());
    });
    items.push([item[3], ...lines.slice(begin + 1, end).map((one) => one.slice(Math.min(leading(one), width)))]);
    const next = firstAfter(lines, end, (one) => one.trim());
    if (next < lines.length && ITEM.test(lines[next]) && leading(lines[next]) <= indent.length + 1) end = next;
  }
  return [{ kind: "list", ordered, start: ordered ? parseInt(mark, 10) : 1, items }, end];
}

const leading = (line) => line.length - line.trimStart().length;

function continues(lines, index, indent) {
  const next = firstAfter(lines, index, (one) => one.trim());
  return next < lines.length && leading(lines[next]) >= indent;
}

const cellsOf = (line) =>
  line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));

function built(block, depth) {
  switch (block.kind) {
    case "code":
      return codeNode(block.language, block.text);
    case "heading":
      return el(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, ...nested(block.lines, depth));
    case "list": {
      const items = block.items.map((lines) => el("li", {}, ...itemNodes(lines, depth)));
      return block.ordered ? el("ol", { start: block.start }, ...items) : el("ul", {}, ...items);
    }
    case "table": {
      const [head, ...rows] = block.rows;
      const row = (cells, tag) => el("tr", {}, ...cells.map((cell) => el(tag, {}, ...inline(cell))));
      const body = el("tbody", {}, ...rows.map((cells) => row(cells, "td")));
      const table = el("table", {}, el("thead", {}, row(head, "th")), body);
      return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, table);
    }
    default:
      return el("p", {}, ...inline(block.text));
  }
}

function nested(lines, depth) {
  if (depth >= MAX_DEPTH) return [lines.join("\n")];
  return blocksOf(lines).map((block) => built(block, depth + 1));
}

// An item of one paragraph has no paragraph element, so that short lists are compact.
function itemNodes(lines, depth) {
  const nodes = nested(lines, depth);
  if (nodes[0]?.tagName === "P") nodes.splice(0, 1, ...nodes[0].childNodes);
  return nodes;
}

function codeNode(language, text) {
  const copy = button("Copy", async () => {
    await copyText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const head = el("figcaption", {}, el("span", {}, language || "text"), copy);
  const code = el("pre", { tabindex: 0, "aria-label": "Code" }, el("code", {}, text));
  return el("figure", { class: "code" }, head, code);
}

// Nodes of a text with its inline marks.
function inline(text, depth = 0) {
  if (depth > MAX_DEPTH || text.length > MAX_INLINE) return [text];
  const nodes = [];
  let rest = text;
  for (let match = INLINE.exec(rest); match; match = INLINE.exec(rest)) {
    if (match.index) nodes.push(rest.slice(0, match.index));
    nodes.push(...marked(match, depth));
    rest = rest.slice(match.index + match[0].length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

function marked(match, depth) {
  const { code, strong, strong2, em, em2, del, label, address, url, br } = match.groups;
  if (match[1] !== undefined) return [match[1]];
  if (code !== undefined) return [el("code", {}, code.replace(/^ (.*) $/, "$1"))];
  if (strong ?? strong2) return [el("strong", {}, ...inline(strong ?? strong2, depth + 1))];
  if (em ?? em2) return [el("em", {}, ...inline(em ?? em2, depth + 1))];
  if (del !== undefined) return [el("del", {}, ...inline(del, depth + 1))];
  if (address !== undefined) return link(label, address, match[0]);
  if (url !== undefined) return link(url, url, match[0]);
  return br ? [el("br")] : [match[0]];
}

// A link to another server, with its target after the label; other addresses stay text.
function link(label, address, source) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return [source];
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return [source];
  const anchor = el("a", { href: url.href, rel: "noopener noreferrer", target: "_blank" }, label || url.href);
  if (label === address || label === url.href) return [anchor];
  const path = url.pathname === "/" ? "" : url.pathname;
  const target = url.host + (path.length > 40 ? `${path.slice(0, 38)}…` : path);
  return [anchor, el("span", { class: "target" }, ` (${target})`)];
}
