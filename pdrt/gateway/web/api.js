// Requests to the gateway that served this page, with the API key if one was given.
const KEY = "pdrt-api-key";
const TIMEOUT_MS = 8000;

export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const needsKey = (error) => error instanceof HttpError && error.status === 401;
// Of this tab only: gone when it is closed.
export const setKey = (key) => sessionStorage.setItem(KEY, key);

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// The OpenAI error's message, or whatever there is.
export async function failure(response) {
  const text = await response.text();
  try {
    return new HttpError(response.status, JSON.parse(text).error.message);
  } catch {
    return new HttpError(response.status, `${response.status} ${text.slice(0, 200)}`);
  }
}

export async function api(path) {
  const response = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw await failure(response);
  return response.json();
}
