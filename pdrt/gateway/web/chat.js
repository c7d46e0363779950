// A chat with the model, streamed; under each answer which workers served it, and how fast.
import { failure, headers } from "./api.js";
import { duration } from "./histograms.js";
import { element, short } from "./map.js";

async function model() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await failure(response);
  return (await response.json()).data[0].id;
}

// The data of each server-sent event, as it comes.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: "));
      yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}

async function ask(messages, signal) {
  const body = { model: await model(), messages, stream: true, stream_options: { include_usage: true } };
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  return response;
}

class Bubble {
  constructor(list) {
    this.text = element("span");
    this.facts = element("small");
    this.reasoning = element("details", "", element("summary", "", "reasoning"), this.thought = element("span"));
    this.reasoning.hidden = true;
    this.facts.textContent = "waiting …";
    this.item = element("li", "assistant", this.reasoning, this.text, this.facts);
    list.append(this.item);
    this.began = performance.now();
    this.first = this.last = null;
    this.pieces = 0;
  }

  add(delta) {
    const piece = delta.content ?? "";
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (!piece && !thought) return;
    this.last = performance.now();
    if (this.first === null) this.facts.textContent = "";
    this.first ??= this.last;
    this.pieces += 1;
    this.text.append(piece);
    if (thought) {
      this.reasoning.hidden = false;
      this.thought.append(thought);
    }
    this.item.parentElement.scrollTop = this.item.parentElement.scrollHeight;
  }

  finish(response, usage, isStopped) {
    const served = (name) => (response?.headers.get(name) ?? "").split(",").filter(Boolean).map(short).join(", ");
    const facts = [];
    if (served("x-pdrt-prefill")) facts.push(`prefill ${served("x-pdrt-prefill")}`);
    if (served("x-pdrt-decode")) facts.push(`decode ${served("x-pdrt-decode")}`);
    if (this.first) facts.push(`first token ${duration((this.first - this.began) / 1000)}`);
    if (this.pieces > 1) facts.push(`${duration((this.last - this.first) / 1000 / (this.pieces - 1))} per token`);
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      facts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens, ${cached} from the cache`);
    }
    if (isStopped) facts.push("stopped");
    this.facts.textContent = facts.join(" · ");
  }

  fail(error) {
    this.item.classList.add("error");
    this.facts.textContent = "";
    this.text.append(this.text.textContent ? `\n${error.message}` : error.message);
  }
}

// The answer's text, or null when there is none to go on from.
async function answer(list, messages, signal) {
  const bubble = new Bubble(list);
  let response = null;
  let usage = null;
  try {
    response = await ask(messages, signal);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const choice of event.choices) bubble.add(choice.delta);
    }
  } catch (error) {
    if (!signal.aborted) {
      bubble.fail(error);
      return null;
    }
  }
  bubble.finish(response, usage, signal.aborted);
  return bubble.text.textContent;
}

export function startChat(list, form) {
  const history = [];
  const { text, send, stop } = form.elements;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const content = text.value.trim();
    if (!content || send.disabled) return;
    text.value = "";
    list.append(element("li", "user", content));
    history.push({ role: "user", content });
    const abort = new AbortController();
    stop.onclick = () => abort.abort();
    send.disabled = true;
    stop.hidden = false;
    const reply = await answer(list, history, abort.signal);
    if (reply === null) history.pop();
    else history.push({ role: "assistant", content: reply });
    send.disabled = false;
    stop.hidden = true;
    text.focus();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}
