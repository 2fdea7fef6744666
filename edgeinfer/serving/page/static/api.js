// Requests to the server that this page comes from, with its API key if it needs one.

const KEY = "edgeinfer-key";
let askForKey = async () => null;

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// `ask`: called when the server refuses the key; resolves to another one, or null.
export function onKeyNeeded(ask) {
  askForKey = ask;
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

function options(method, body, extra) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body === undefined) return { method, headers, ...extra };
  headers["Content-Type"] = "application/json";
  return { method, headers, body: JSON.stringify(body), ...extra };
}

// The response to a request. Throws ApiError unless it succeeds.
export async function request(method, path, body, extra = {}) {
  for (;;) {
    let response;
    try {
      response = await fetch(path, options(method, body, extra));
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("the server can't be reached; is it running?", 0);
    }
    if (response.ok) return response;
    if (response.status === 401) {
      const key = await askForKey(sessionStorage.getItem(KEY) !== null);
      if (key !== null) {
        setKey(key);
        continue;
      }
    }
    throw new ApiError(await errorText(response), response.status);
  }
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

export const get = async (path) => (await request("GET", path)).json();
export const send = async (method, path, body, extra) => (await request(method, path, body, extra)).json();

// The data of server-sent events as objects, up to [DONE].
export async function* events(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("the server ended the response too early", 0);
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 500);
      yield event;
    }
  }
}
