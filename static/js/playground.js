// The playground: one message to one or two models of a run's server; each keeps a conversation of its own.
(() => {
  const form = document.getElementById("playground");
  if (!form) return;
  const stopButton = form.querySelector("[data-stop]");
  const sendButton = form.querySelector("[data-testid=send]");
  let running = null;

  const sides = [...form.querySelectorAll("[data-side]:not([hidden])")].map((element) => ({
    element, history: [], log: element.querySelector(".talk"), facts: element.querySelector(".side-facts"),
    select: element.querySelector("select"),
  }));
  const add = (side, role, text) => {
    side.log.querySelector(".placeholder")?.remove();
    const message = document.createElement("div");
    message.className = `said ${role}`;
    const label = document.createElement("span");
    label.className = "role";
    label.textContent = role;
    const body = document.createElement("pre");
    body.textContent = text;
    message.append(label, body);
    side.log.append(message);
    side.log.scrollTop = side.log.scrollHeight;
    return body;
  };

  // JSON lines as they come; a line may arrive in two pieces.
  async function* lines(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) if (part) yield JSON.parse(part);
    }
  }
  const ask = async (side, question, signal) => {
    const system = form.elements.system.value.trim();
    const conversation = [...side.history, { role: "user", content: question }];
    const body = {
      model: side.select.value, temperature: Number(form.elements.temperature.value), max_tokens: Number(form.elements.max_tokens.value),
      messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    };
    add(side, "user", question);
    const answer = add(side, "assistant", "");
    const fail = (sentence) => { answer.parentElement.classList.add("failed"); answer.textContent += sentence; };
    side.facts.textContent = "…";
    const begun = performance.now();
    let done = null;
    try {
      const response = await fetch(form.dataset.url, {
        method: "POST", signal, body: JSON.stringify(body),
        headers: { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
      });
      if (!response.ok) {
        const refusal = await response.json().catch(() => ({}));
        throw new Error(refusal.failed || `The studio answered ${response.status}.`);
      }
      for await (const line of lines(response.body)) {
        if (line.text) { answer.textContent += line.text; side.log.scrollTop = side.log.scrollHeight; }
        if (line.failed) throw new Error(line.failed);
        if (line.done) done = line;
      }
    } catch (error) {
      side.facts.textContent = "";
      if (error.name !== "AbortError") fail(error.message);
      else answer.parentElement.classList.add("stopped");
      return;
    }
    const seconds = (performance.now() - begun) / 1000;
    side.history = [...conversation, { role: "assistant", content: answer.textContent }];
    const speed = done?.tokens ? `${done.tokens} tokens, ${(done.tokens / seconds).toFixed(0)} tokens/s` : `${seconds.toFixed(1)} s`;
    side.facts.textContent = done?.done === "length" ? `${speed}, cut at the limit` : speed;
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const question = form.elements.question.value.trim();
    if (!question || running) return;
    running = new AbortController();
    sendButton.disabled = true;
    stopButton.disabled = false;
    form.elements.question.value = "";
    await Promise.all(sides.map((side) => ask(side, question, running.signal)));
    running = null;
    sendButton.disabled = false;
    stopButton.disabled = true;
    form.elements.question.focus();
  });
  form.elements.question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  stopButton.addEventListener("click", () => running?.abort());
  form.querySelector("[data-clear]").addEventListener("click", () => {
    running?.abort();
    for (const side of sides) {
      side.history = [];
      side.log.replaceChildren();
      side.facts.textContent = "";
    }
  });
  form.addEventListener("click", (event) => {
    const chosen = event.target.closest("[data-prompt]");
    if (!chosen) return;
    form.elements.question.value = chosen.dataset.prompt;
    form.elements.question.focus();
  });
})();
