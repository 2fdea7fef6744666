// The page: header, theme, shortcuts, and what connects the list of chats with the conversation.

import { get, onKeyNeeded, send, setKey } from "./api.js";
import { Composer } from "./composer.js";
import { Conversation, welcomeNode } from "./chat/conversation.js";
import { Tools } from "./chat/tools.js";
import { keyDialog, settingsDialog, shortcutsDialog, textPage } from "./dialogs.js";
import { byId, el, showAlert, shownBytes } from "./dom.js";
import { Sidebar } from "./sidebar.js";

const PROMPTS = ["Tell me a story about a fox.", "Write a haiku about rain.", "What can you do?"];
const page = { models: [], defaults: {}, system: null, plan: null };

const tools = new Tools();
const composer = new Composer({
  send: (text) => conversation.send(text),
  stop: () => conversation.stop(),
  cancelEdit: () => conversation.cancelEdit(),
});
const conversation = new Conversation({
  composer,
  model: () => byId("model").value,
  settings: () => page.defaults,
  tools,
  welcome: () => welcomeNode(byId("model").value, glance(), PROMPTS, fill),
  note: showNote,
  changed: showChat,
});
const sidebar = new Sidebar({
  open: (chat, message) => openChat(chat.id, message ?? null),
  deleted: (chat) => conversation.chat?.id === chat.id && newChat(),
  renamed: (chat) => {
    if (conversation.chat?.id !== chat.id) return;
    conversation.chat = { ...conversation.chat, name: chat.name };
    showTitle();
  },
});

function fill(text) {
  composer.set(text);
  composer.focus();
}

async function newChat() {
  await conversation.startNew(page.system);
  showNote("");
  sidebar.show(false);
  composer.focus();
}

async function openChat(id, message = null) {
  try {
    await conversation.open(id, message);
  } catch (error) {
    showAlert(error.message);
    return;
  }
  showNote("");
  const name = conversation.chat.model;
  const known = page.models.find((model) => name === model.name || name === model.path);
  if (known) byId("model").value = known.name;
  await showPlan();
  sidebar.show(false);
  if (message === null) composer.focus();
  else conversation.views.get(message)?.node.scrollIntoView();
}

// After a change of the chat: the title, the address, and the list.
function showChat() {
  showTitle();
  const { chat } = conversation;
  history.replaceState(null, "", chat === null ? "/" : `/#chat=${chat.id}`);
  sidebar.refresh(chat?.id ?? null).catch((error) => showAlert(error.message));
  if (page.plan === null) showPlan().catch((error) => showAlert(error.message));
}

function showTitle() {
  byId("title").textContent = conversation.title;
  document.title = conversation.chat === null ? "edgeinfer" : `${conversation.title} – edgeinfer`;
}

function showNote(text, speed = "") {
  byId("note").textContent = [speed, text].filter(Boolean).join("; ");
}

// The model's memory and speed in one line.
function glance() {
  if (page.plan) return page.plan.verdict;
  const model = page.models.find((one) => one.name === byId("model").value);
  return model ? `${shownBytes(model.bytes)}, ${model.state}` : "";
}

async function showPlan() {
  const name = byId("model").value;
  page.plan = (await get(`/page/plan?model=${encodeURIComponent(name)}`)).plan;
  const several = page.models.length > 1;
  byId("plan").textContent = [several ? null : name, glance()].filter(Boolean).join(": ");
  if (conversation.branch.length === 0) conversation.show();
}

async function showSettings() {
  const changed = await settingsDialog(conversation.system, page.defaults);
  if (changed === null) return;
  page.defaults = changed.settings;
  conversation.system = changed.system;
  if (conversation.chat === null) page.system = changed.system;
  else await send("PATCH", `/page/chats/${conversation.chat.id}`, { system: changed.system });
}

const THEMES = { light: "light", dark: "dark", system: "as the system" };

// Light, dark, as the system, and again.
function nextTheme() {
  const names = Object.keys(THEMES);
  const now = document.documentElement.dataset.theme ?? "system";
  const next = names[(names.indexOf(now) + 1) % names.length];
  if (next === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("edgeinfer-theme");
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem("edgeinfer-theme", next);
  }
  showTheme();
}

function showTheme() {
  const name = THEMES[document.documentElement.dataset.theme ?? "system"];
  byId("theme").setAttribute("aria-label", `Theme: ${name}`);
  byId("theme").title = `Theme: ${name}`;
}

const SHORTCUTS = {
  KeyN: newChat,
  KeyR: () => conversation.regenerate(),
  KeyE: () => conversation.editLast(),
  KeyM: () => composer.focus(),
  KeyK: () => {
    sidebar.show(true);
    byId("search").focus();
  },
  KeyL: nextTheme,
};

addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const action = event.altKey && event.shiftKey && !event.ctrlKey ? SHORTCUTS[event.code] : undefined;
  if (action) action();
  else if (event.ctrlKey && event.key === "/") shortcutsDialog();
  else if (event.key === "Escape") escape();
  else return;
  event.preventDefault();
});

function escape() {
  if (conversation.running) conversation.stop();
  else if (!conversation.cancelEdit()) sidebar.show(false);
}

byId("new-chat").addEventListener("click", newChat);
byId("theme").addEventListener("click", nextTheme);
byId("help").addEventListener("click", shortcutsDialog);
byId("settings").addEventListener("click", () => showSettings().catch((error) => showAlert(error.message)));
byId("plan").addEventListener("click", () => textPage("Plan", page.plan?.text ?? "The plan is known once the model is loaded."));
byId("model").addEventListener("change", async () => {
  await showPlan();
  const { chat } = conversation;
  if (chat !== null) await send("PATCH", `/page/chats/${chat.id}`, { model: byId("model").value });
});
onKeyNeeded(keyDialog);

// The chat that the address names, and the key of `edgeinfer chat --web`, which is removed from the address.
function takeAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const key = fields.get("key");
  if (key) {
    setKey(key);
    fields.delete("key");
    history.replaceState(null, "", `/#${fields}`);
  }
  return Number(fields.get("chat")) || null;
}

async function start() {
  showTheme();
  const wanted = takeAddress();
  const state = await get("/page/state");
  Object.assign(page, { models: state.models, defaults: state.settings, system: state.system });
  byId("model").replaceChildren(...page.models.map((model) => el("option", { value: model.name }, model.name)));
  byId("model").hidden = page.models.length < 2;
  const loaded = page.models.find((model) => model.state === "loaded");
  if (loaded) byId("model").value = loaded.name;
  await showPlan();
  await tools.load();
  if (tools.warnings.length > 0) showAlert(tools.warnings.join("; "));
  if (wanted) await openChat(wanted);
  if (conversation.chat === null) await newChat();
}

start().catch((error) => showAlert(error.message));
