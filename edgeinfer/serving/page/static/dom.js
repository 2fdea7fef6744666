// Builds DOM nodes. Text is always a text node; nothing here parses HTML.

export const byId = (id) => document.getElementById(id);

// A new element. Attributes: a function is an event listener, true an empty attribute, false or null none.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function button(label, onClick, attributes = {}) {
  return el("button", { type: "button", click: onClick, ...attributes }, label);
}

// Copies text; a page that isn't served over HTTPS or from this machine has no clipboard API.
export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = el("textarea", { class: "hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

let alertTimer = 0;

// A message that goes away by itself; screen readers read it at once.
export function showAlert(text) {
  const box = byId("alert");
  box.replaceChildren(el("span", {}, text), button("✕", () => (box.hidden = true), { "aria-label": "Dismiss" }));
  box.hidden = false;
  clearTimeout(alertTimer);
  alertTimer = setTimeout(() => (box.hidden = true), 12000);
}

// Text that screen readers read when they are ready; it isn't shown.
export function announce(text) {
  const live = byId("live");
  live.append(el("p", {}, text));
  while (live.childNodes.length > 20) live.firstChild.remove();
}

export const shownBytes = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) [bytes, unit] = [bytes / 1024, unit + 1];
  return `${bytes < 10 && unit > 0 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
};
