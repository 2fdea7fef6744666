// Dialogs: a question, a text, the settings, the plan, the shortcuts. Esc closes each.

import { button, el } from "./dom.js";

// Shows a dialog; resolves to what `read` returns if it is confirmed, else null.
function ask(title, content, { confirm = "OK", cancel = "Cancel", read = () => true, danger = false } = {}) {
  return new Promise((resolve) => {
    const dialog = el("dialog", { "aria-labelledby": "dialog-title" });
    const close = (value) => {
      dialog.close();
      dialog.remove();
      resolve(value);
    };
    const form = el("form", {
      method: "dialog",
      submit: (event) => {
        event.preventDefault();
        close(read());
      },
    });
    const cancelButton = cancel && button(cancel, () => close(null));
    const buttons = el("p", { class: "buttons" }, cancelButton, el("button", { class: danger ? "danger" : "primary" }, confirm));
    form.append(el("h2", { id: "dialog-title" }, title), ...content, buttons);
    dialog.append(form);
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      close(null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

// Asks whether a tool is called: "yes", "always" (until the page is loaded again) or "no". The focus is on No.
export function callDialog(call, signal) {
  return new Promise((resolve) => {
    const dialog = el("dialog", { "aria-labelledby": "dialog-title", class: "call" });
    const close = (answer) => {
      signal.removeEventListener("abort", abort);
      dialog.close();
      dialog.remove();
      resolve(answer);
    };
    const abort = () => close("no");
    signal.addEventListener("abort", abort);
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      close("no");
    });
    const values = el("pre", { tabindex: 0, "aria-label": "Arguments" }, JSON.stringify(call.arguments, null, 2));
    const buttons = el(
      "p",
      { class: "buttons" },
      button("Don't run", () => close("no"), { autofocus: true }),
      button("Always run this tool", () => close("always")),
      button("Run", () => close("yes"), { class: "primary" }),
    );
    dialog.append(el("h2", { id: "dialog-title" }, "Run ", el("code", {}, call.name), "?"), values, buttons);
    document.body.append(dialog);
    dialog.showModal();
  });
}

const labelled = (id, text, field) => el("p", {}, el("label", { for: id }, text), field);

export const confirmDialog = (title, text, confirm) => ask(title, [el("p", {}, text)], { confirm, danger: true });

export function textDialog(title, label, value, options = {}) {
  const field = el("input", { id: "dialog-text", value, autocomplete: "off", maxlength: 80, ...options });
  return ask(title, [labelled("dialog-text", label, field)], { confirm: "Save", read: () => field.value.trim() });
}

export function keyDialog(wasRefused) {
  const field = el("input", { id: "dialog-key", type: "password", autocomplete: "off" });
  const text = wasRefused ? "The server refused this key." : "This server needs its key (--key).";
  const note = el("p", { class: "dim" }, "It is kept until this tab is closed.");
  const content = [el("p", {}, text), labelled("dialog-key", "API key", field), note];
  return ask("API key", content, { confirm: "Continue", read: () => field.value.trim() });
}

// The system prompt and the sampling settings; an empty field is the server's default.
export function settingsDialog(system, settings) {
  const area = el("textarea", { id: "set-system", rows: 4 });
  area.value = system ?? "";
  const numbers = [
    ["temperature", "Temperature", { min: 0, max: 5, step: "any" }],
    ["top_p", "Top-p", { min: 0, max: 1, step: "any" }],
    ["max_tokens", "Maximum tokens of a response", { min: 1, step: 1 }],
  ].map(([name, label, limits]) => {
    const field = el("input", { id: `set-${name}`, type: "number", value: settings[name], placeholder: "default", ...limits });
    return { name, field, node: labelled(`set-${name}`, label, field) };
  });
  const content = [labelled("set-system", "System prompt of this chat", area), ...numbers.map((one) => one.node)];
  const read = () => ({
    system: area.value.trim(),
    settings: {
      ...Object.fromEntries(Object.entries(settings).filter(([name]) => !numbers.some((one) => one.name === name))),
      ...Object.fromEntries(numbers.filter((one) => one.field.value !== "").map((one) => [one.name, Number(one.field.value)])),
    },
  });
  return ask("Settings", content, { confirm: "Save", read });
}

export function textPage(title, text) {
  const shown = el("pre", { tabindex: 0, "aria-label": title }, text);
  return ask(title, [shown], { confirm: "Close", cancel: null });
}

const SHORTCUTS = [
  ["Enter", "send the message"],
  ["Shift+Enter", "a new line in the message"],
  ["Esc", "stop the response; leave a message that is being edited"],
  ["Alt+Shift+N", "a new chat"],
  ["Alt+Shift+R", "another response to the last message"],
  ["Alt+Shift+E", "edit the last message"],
  ["Alt+Shift+M", "go to the message field"],
  ["Alt+Shift+K", "go to the search of chats"],
  ["Alt+Shift+L", "light, dark, or as the system"],
  ["Ctrl+/", "this list"],
];

export function shortcutsDialog() {
  const rows = SHORTCUTS.map(([keys, meaning]) => el("tr", {}, el("th", { scope: "row" }, el("kbd", {}, keys)), el("td", {}, meaning)));
  return ask("Keyboard shortcuts", [el("table", { class: "shortcuts" }, el("tbody", {}, ...rows))], { confirm: "Close", cancel: null });
}
