// The token view: completions as single tokens, coloured by what the trainer knows of each. Values come once for each group.
(() => {
  const select = document.getElementById("colour");
  if (!select) return;
  const facts = document.getElementById("token-facts");
  const steps = { ratio: [0.02, 0.05, 0.1, 0.2, 0.5], advantage: [0.1, 0.5, 1, 1.5, 2], entropy: [0.1, 0.3, 0.7, 1.2, 2] };
  const level = (size, bounds) => bounds.filter((bound) => size >= bound).length;
  const signed = (value, size, bounds) => {
    const strength = level(size, bounds);
    return strength ? `${value > 0 ? "up" : "down"}-${strength}` : "";
  };
  const colours = {
    ratio: (token) => signed(Math.log(token.ratio), Math.abs(Math.log(token.ratio)), steps.ratio),
    advantage: (token) => signed(token.advantage, Math.abs(token.advantage), steps.advantage),
    entropy: (token) => signed(1, token.entropy, steps.entropy),
    mask: (token) => (token.mark === "o" ? "down-4" : "up-2"),
  };
  const describe = (token) => {
    const text = JSON.stringify(token.text);
    if (token.mark === ".") return `${text}: context, not trained`;
    const sampler = Math.exp(token.logProb);
    const parts = [`ratio ${token.ratio}`, `sampler ${(100 * sampler).toPrecision(3)} %`,
      `trainer ${(100 * sampler * token.ratio).toPrecision(3)} %`, `entropy ${token.entropy} nats`,
      `advantage ${token.advantage.toPrecision(3)}`];
    if (token.mark === "o") parts.push("left out of the loss");
    return `${text}: ${parts.join(", ")}`;
  };
  const tokensOf = (sequence) => {
    let at = -1;
    return sequence.text.map((text, place) => {
      const mark = sequence.mask[place];
      if (mark !== ".") at += 1;
      const known = mark === "." ? {} : { ratio: sequence.ratio[at], entropy: sequence.entropy[at], logProb: sequence.log_probs[at] };
      return { text, mark, advantage: sequence.advantage, ...known };
    });
  };

  const draw = (sequences) => {
    const view = document.createElement("div");
    view.className = "token-view";
    view.tabIndex = 0;
    view.setAttribute("role", "group");
    view.setAttribute("aria-label", "Tokens; a click on one tells its values");
    view.dataset.testid = "tokens";
    for (const sequence of sequences) {
      const line = document.createElement("pre");
      for (const token of tokensOf(sequence)) {
        if (!token.text) continue;
        const span = document.createElement("span");
        span.className = token.mark === "." ? "t context" : `t ${colours[select.value](token)}`;
        span.textContent = token.text.replace(/\n/g, "⏎\n");
        span.title = describe(token);
        line.append(span);
      }
      if (sequence.left_out) line.append(` … ${sequence.left_out} more tokens`);
      view.append(line);
    }
    return view;
  };

  const answers = new Map();
  const fetchTokens = (url) => {
    if (!answers.has(url)) {
      answers.set(url, fetch(url).then((answer) => {
        if (!answer.ok) throw new Error(`the studio answered ${answer.status}`);
        return answer.json();
      }));
    }
    return answers.get(url);
  };
  const show = async (group) => {
    const note = group.querySelector(".no-tokens");
    for (const old of group.querySelectorAll(".token-view")) old.remove();
    for (const text of group.querySelectorAll(".rollout-text")) text.hidden = false;
    note.hidden = true;
    if (!select.value) return;
    let found;
    try {
      found = (await fetchTokens(group.dataset.tokens)).rollouts;
    } catch (error) {
      answers.delete(group.dataset.tokens);
      facts.textContent = `The tokens can't be shown: ${error.message}.`;
      return;
    }
    if (!select.value || group.querySelector(".token-view")) return;
    note.hidden = Object.values(found).some((sequences) => sequences.length);
    for (const card of group.querySelectorAll("[data-rollout]")) {
      const sequences = found[card.dataset.rollout] || [];
      if (!sequences.length) continue;
      const text = card.querySelector(".rollout-text");
      text.hidden = true;
      text.after(draw(sequences));
    }
  };

  const groups = [...document.querySelectorAll("[data-tokens]")];
  const update = () => {
    for (const legend of document.querySelectorAll("[data-legend]")) legend.hidden = legend.dataset.legend !== select.value;
    for (const input of document.querySelectorAll("input[data-colour]")) input.value = select.value;
    facts.textContent = "";
    const here = new URL(location.href);
    if (select.value) here.searchParams.set("colour", select.value); else here.searchParams.delete("colour");
    history.replaceState(null, "", here);
    for (const link of document.querySelectorAll(".rollout-filters a[rel], .pager a, .rollout-link, .group-strip a")) {
      const url = new URL(link.href);
      if (select.value) url.searchParams.set("colour", select.value); else url.searchParams.delete("colour");
      link.href = url;
    }
    for (const group of groups) show(group);
  };
  select.addEventListener("change", update);
  document.addEventListener("click", (event) => {
    const token = event.target.closest(".token-view .t");
    if (!token) return;
    document.querySelector(".token-view .t.chosen")?.classList.remove("chosen");
    token.classList.add("chosen");
    facts.textContent = token.title;
  });
  update();
})();
