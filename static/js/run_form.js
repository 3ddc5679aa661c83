// The new-run form: shows what is relevant, checks while somebody types, adds and removes rewards.
(() => {
  const form = document.getElementById("run-form");
  const rows = document.getElementById("reward-rows");
  const template = document.getElementById("reward-row-template");
  let touched = false;

  // --- what is relevant
  const valueOf = (name) => {
    const control = form.elements[name];
    return control.type === "checkbox" ? (control.checked ? "on" : "") : control.value;
  };
  const showRelevant = () => {
    for (const field of form.querySelectorAll("[data-shown-by]")) {
      field.hidden = !new RegExp(field.dataset.shownIf).test(valueOf(field.dataset.shownBy));
    }
    for (const fold of form.querySelectorAll("details.advanced")) {
      fold.hidden = ![...fold.querySelectorAll(".field")].some((field) => !field.hidden);
    }
  };

  // --- rewards
  const showReward = (row) => {
    const option = row.querySelector("[data-reward-name]").selectedOptions[0];
    const versions = option?.dataset.versions || "";
    row.querySelector(".version").hidden = !versions;
    if (!versions) row.querySelector(".version input").value = "";
    row.querySelector(".version input").title = versions ? `There are ${versions}` : "";
    row.querySelector("[data-reward-help]").textContent = option?.dataset.help || "";
    row.querySelector("[data-remove-reward]").hidden = rows.childElementCount < 2;
  };
  const showRewards = () => { for (const row of rows.children) showReward(row); };
  document.getElementById("add-reward").addEventListener("click", (event) => {
    event.preventDefault();
    const next = Math.max(-1, ...[...rows.children].map((row) => Number(row.dataset.rewardRow))) + 1;
    rows.insertAdjacentHTML("beforeend", template.innerHTML.replaceAll("__index__", next));
    rows.lastElementChild.querySelector("select").focus();
    changed();
  });
  rows.addEventListener("click", (event) => {
    if (!event.target.closest("[data-remove-reward]")) return;
    event.target.closest(".reward-row").remove();
    changed();
  });

  // --- live check
  const result = document.getElementById("check-result");
  const problemList = document.getElementById("check-problems");
  const element = (tag, text, attributes = {}) => {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const labelOf = (path) => form.querySelector(`label[for="id_${CSS.escape(path)}"]`)?.textContent.trim() || path;
  const slotFor = (path) => {
    for (let at = path; at; at = at.includes(".") ? at.slice(0, at.lastIndexOf(".")) : "") {
      const slot = form.querySelector(`[data-error-for="${CSS.escape(at)}"]`);
      if (slot) return slot;
    }
    return null;
  };
  const note = (kind, text) => {
    const made = element("p", text, { class: `check-note ${kind}` });
    result.replaceChildren(made);
  };
  const fillList = (list, items, make) => list.replaceChildren(...items.map(make));

  const show = (answer) => {
    for (const slot of form.querySelectorAll("[data-error-for]")) slot.textContent = "";
    for (const control of form.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
    // Positions count from the first row in the answer; rows on the page keep the numbers they were made with.
    const numbers = [...rows.children].map((row) => row.dataset.rewardRow);
    const onPage = (path) => path.replace(/^rewards\.(\d+)/, (_, index) => `rewards.${numbers[index]}`);
    for (const problem of answer.problems) {
      const path = onPage(problem.field);
      const slot = slotFor(path);
      if (slot) slot.textContent = slot.textContent ? `${slot.textContent} ${problem.message}` : problem.message;
      form.elements[path]?.setAttribute?.("aria-invalid", "true");
      slot?.closest("details")?.setAttribute("open", "");
    }
    fillList(problemList, answer.problems, (problem) => {
      const item = element("li", "");
      const target = document.getElementById(`id_${onPage(problem.field)}`);
      if (target) {
        const link = element("button", labelOf(onPage(problem.field)), { type: "button", class: "link" });
        link.addEventListener("click", () => target.focus());
        item.append(link, ": ");
      }
      item.append(problem.message);
      return item;
    });
    const count = answer.problems.length;
    if (count) note("bad", count === 1 ? "One thing to settle first:" : `${count} things to settle first:`);
    else note("good", "Ready to launch.");
    fillList(document.getElementById("check-facts"), answer.facts, (fact) => element("li", fact));
    const commands = document.getElementById("check-commands");
    commands.hidden = !answer.commands.length;
    commands.querySelector(".body").replaceChildren(...answer.commands.flatMap((command) => [
      element("h3", command.title), element("pre", command.text, { class: "log-lines", tabindex: "0", "aria-label": `Command of the ${command.title}` }),
    ]));
    const prompts = document.getElementById("check-prompts");
    prompts.hidden = !answer.prompts.length;
    fillList(prompts.querySelector(".body"), answer.prompts, (prompt) => element("pre", prompt, { class: "prompt" }));
    const diff = document.getElementById("check-diff");
    diff.hidden = !form.elements.from;
    const changes = answer.diff.length ? answer.diff : [];
    fillList(diff.querySelector("ul"), changes, (change) => {
      const item = element("li", "");
      item.append(element("code", change.path), element("del", JSON.stringify(change.before)), element("ins", JSON.stringify(change.after)));
      return item;
    });
    if (!changes.length) diff.querySelector("ul").append(element("li", answer.problems.length && !answer.facts.length ? "Shown once the settings are valid." : "Nothing yet.", { class: "muted" }));
  };

  let request = null;
  let timer = null;
  const check = async () => {
    request?.abort();
    request = new AbortController();
    const body = new FormData(form);
    body.delete("yaml");
    body.delete("yaml_file");
    // The page came without the names of all datasets, which take the server a moment.
    const datasets = document.getElementById("list_data.source");
    if (!datasets.options.length) body.set("suggest", "1");
    try {
      const answer = await fetch(form.dataset.checkUrl, { method: "POST", body, signal: request.signal });
      if (!answer.ok || answer.redirected) throw new Error(`the studio answered ${answer.status}`);
      const checked = await answer.json();
      if (checked.datasets) {
        datasets.replaceChildren(...checked.datasets.map((name) => element("option", "", { value: name })));
      }
      show(checked);
    } catch (error) {
      if (error.name !== "AbortError") note("bad", `Can't check: ${error.message}.`);
    }
  };
  const changed = () => {
    showRelevant();
    showRewards();
    clearTimeout(timer);
    timer = setTimeout(check, 400);
  };
  form.addEventListener("input", (event) => {
    if (event.target.name === "yaml" || event.target.name === "yaml_file") return;
    touched = true;
    changed();
  });
  showRelevant();
  showRewards();
  check();

  // Enter in a field must not save or launch; leaving with changes asks.
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches("input:not([type=file])")) event.preventDefault();
  });
  let leaving = false;
  form.addEventListener("submit", (event) => { leaving = event.submitter?.value !== "export"; });
  addEventListener("beforeunload", (event) => { if (touched && !leaving) event.preventDefault(); });
})();
