// The list of chats: search, open, rename, export, delete.

import { get, request, send } from "./api.js";
import { confirmDialog, textDialog } from "./dialogs.js";
import { button, byId, el, showAlert } from "./dom.js";

const SEARCH_MILLISECONDS = 200;

export class Sidebar {
  // `open(chat, message)`, `deleted(chat)` and `renamed(chat)` are called with a chat of the list.
  constructor({ open, deleted, renamed }) {
    Object.assign(this, { open, deleted, renamed, current: null, timer: 0 });
    byId("search").addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.refresh(), SEARCH_MILLISECONDS);
    });
    byId("open-sidebar").addEventListener("click", () => this.show(true));
    byId("close-sidebar").addEventListener("click", () => this.show(false));
    byId("shade").addEventListener("click", () => this.show(false));
  }

  // On narrow screens the list covers the messages.
  show(isShown) {
    document.body.classList.toggle("sidebar-open", isShown);
    byId("open-sidebar").setAttribute("aria-expanded", String(isShown));
    if (isShown) byId("search").focus();
    else if (byId("sidebar").contains(document.activeElement)) byId("open-sidebar").focus();
  }

  async refresh(current = this.current) {
    this.current = current;
    const search = byId("search").value.trim();
    const { chats } = await get(`/page/chats${search ? `?search=${encodeURIComponent(search)}` : ""}`);
    byId("no-chats").hidden = chats.length > 0;
    byId("no-chats").textContent = search ? "Found in no chat." : "No chats yet.";
    byId("chats").replaceChildren(...chats.map((chat) => this.#row(chat)));
  }

  #row(chat) {
    const name = chat.name ?? (chat.title || "(empty)");
    const opens = button("", () => this.open(chat, chat.found), {
      class: "chat",
      "aria-current": chat.id === this.current ? "page" : null,
      title: name,
    });
    opens.append(el("span", { class: "name" }, name), el("span", { class: "dim" }, chat.excerpt ?? shownAgo(chat.changed)));
    const summary = el("summary", { "aria-label": `Actions on ${name}` }, "⋯");
    const menu = el("details", { class: "menu", name: "chat-menu" }, summary);
    const item = (label, action) =>
      button(label, async () => {
        menu.open = false;
        try {
          await action();
        } catch (error) {
          showAlert(error.message);
        }
      });
    const items = [
      item("Rename", () => this.#rename(chat)),
      item("Export as Markdown", () => exportChat(chat, "md")),
      item("Export as JSON lines", () => exportChat(chat, "jsonl")),
      item("Delete", () => this.#delete(chat, name)),
    ];
    menu.append(el("div", { class: "items" }, ...items));
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      event.stopPropagation();
      menu.open = false;
      summary.focus();
    });
    return el("li", {}, opens, menu);
  }

  async #rename(chat) {
    const name = await textDialog("Rename the chat", "Name", chat.name ?? "");
    if (!name) return;
    this.renamed(await send("PATCH", `/page/chats/${chat.id}`, { name }));
    await this.refresh();
  }

  async #delete(chat, name) {
    const text = `“${name}” with ${chat.messages} messages is deleted on this disk, for the terminal chat too.`;
    if (!(await confirmDialog("Delete the chat?", text, "Delete"))) return;
    await request("DELETE", `/page/chats/${chat.id}`);
    this.deleted(chat);
    await this.refresh();
  }
}

async function exportChat(chat, format) {
  const response = await request("GET", `/page/chats/${chat.id}/export?format=${format}`);
  const address = URL.createObjectURL(await response.blob());
  el("a", { href: address, download: `chat-${chat.label}.${format}` }).click();
  URL.revokeObjectURL(address);
}

function shownAgo(seconds) {
  const format = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
  let ago = Math.max(0, Date.now() / 1000 - seconds);
  if (ago < 60) return "just now";
  for (const [unit, size] of [["minute", 60], ["hour", 60], ["day", 24], ["month", 30], ["year", 12]]) {
    ago /= size;
    const next = { minute: 60, hour: 24, day: 30, month: 12 }[unit] ?? Infinity;
    if (ago < next) return format.format(-Math.floor(ago), unit);
  }
  return "";
}
