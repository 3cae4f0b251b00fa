// Requests to the server: its key, its errors, its streams.

const KEY = "mlxspec-key"; // in sessionStorage: gone with the tab
export const OFFLINE = "no connection to the server";
export const BROKE_OFF = "the connection to the server broke off";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

// An error with the status and the code of the server's answer; status 0: there was none.
export class Refused extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    Object.assign(this, { status, code });
  }
}

// The response to a request, if the server accepts it. Throws Refused, and AbortError.
export async function send(path, { method = "GET", body, signal } = {}) {
  // A header takes bytes: encode the key.
  const named = String.fromCharCode(...new TextEncoder().encode(key.get()));
  const headers = { "Content-Type": "application/json", ...(named ? { Authorization: `Bearer ${named}` } : {}) };
  const options = { method, headers, cache: "no-store", signal, body: body && JSON.stringify(body) };
  const response = await fetch(path, options).catch((error) => {
    throw error.name === "AbortError" ? error : new Refused(OFFLINE);
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const { error } = await response.json().catch(() => ({}));
  const message = error?.message ?? error ?? `the server answered ${response.status}`;
  return new Refused(message, response.status, error?.code ?? "");
}

// The parts of a stream that end with `mark`, as they come. Throws Refused where it breaks off.
async function* parts(response, mark) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Refused(BROKE_OFF);
      });
      if (done) return;
      const found = (rest + value).split(mark);
      rest = found.pop();
      yield* found;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Server-sent events, each event's data.
export async function* events(response) {
  for await (const block of parts(response, "\n\n"))
    for (const line of block.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
}

// The objects of a stream of JSON lines.
export async function* lines(response) {
  for await (const line of parts(response, "\n")) if (line) yield JSON.parse(line);
}
