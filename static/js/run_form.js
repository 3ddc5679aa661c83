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
      // One that is wrong, or written in, stays until that is settled.
      const needed = field.querySelector("[data-error-for]").textContent.trim() || field.contains(document.activeElement);
      field.hidden = !needed && !new RegExp(field.dataset.shownIf).test(valueOf(field.dataset.shownBy));
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

  // --- memory, devices, and who waits for whom
  const showBefore = (before) => {
    fillList(document.getElementById("check-waits"), before?.waits || [], (text) => element("li", text));
    const memory = document.getElementById("check-memory");
    memory.hidden = !before;
    document.getElementById("check-hosts").hidden = !before?.hosts.length;
    if (!before) return;
    const sentence = memory.querySelector("[data-memory-sentence]");
    sentence.textContent = before.memory.sentence;
    sentence.className = before.memory.tight ? "check-note bad" : "";
    const gib = (bytes) => (bytes / 2 ** 30).toFixed(2);
    const line = (title, bytes, attributes) => {
      const made = element("tr", "", attributes);
      made.append(element("td", title), element("td", gib(bytes), { class: "num" }));
      return made;
    };
    memory.querySelector("table").hidden = !before.memory.rows.length;
    memory.querySelector("tbody").replaceChildren(...before.memory.rows.flatMap((row) => [
      line(row.title, row.bytes, { class: "sum" }), ...row.parts.map(([title, bytes]) => line(title, bytes, { class: "part" })),
    ]));
    showHosts(before.hosts);
  };
  const ROLES = { server: "generates", trainer: "trains" };
  const showHosts = (hosts) => {
    const body = document.querySelector("#check-hosts .body");
    const choosable = hosts.some((host) => host.devices.some((device) => device.kind === "gpu"));
    body.replaceChildren(
      ...hosts.map((host) => {
        const box = element("div", "", { class: `host-picture${host.chosen ? " chosen" : ""}` });
        const head = element("p", host.name, { class: "host-name" });
        if (host.state) head.append(" ", element("span", host.state, { class: "muted" }));
        const row = element("div", "", { class: "device-row" });
        row.append(...host.devices.map((device) => deviceCell(host, device)));
        box.append(head, row);
        return box;
      }),
      ...(choosable ? [element("p", "Click a GPU for one server more, or to have it train instead. A run takes the first free ones of its host.", { class: "help" })] : []),
    );
  };
  const deviceCell = (host, device) => {
    const named = (role) => (role === "server" && device.server !== null ? `server ${device.server}` : ROLES[role]);
    const roles = device.roles.map(named).join(" and ");
    const state = roles || (device.run === null ? "free" : `held by ${device.run}`);
    const title = device.kind === "gpu" ? `GPU ${device.index}` : "CPU";
    const cell = element(device.kind === "gpu" ? "button" : "span", "", {
      class: `device-cell${device.run === null ? "" : " held"}${device.roles.map((role) => ` ${role}`).join("")}`,
      title: `${device.name}, ${device.gib} GiB: ${state}`, ...(device.kind === "gpu" ? { type: "button" } : {}),
    });
    cell.append(element("b", title), element("span", state));
    if (device.kind === "gpu") cell.addEventListener("click", () => chooseGpu(device));
    return cell;
  };
  // Unused gets a server, then trains, then is unused again; at least one of each is needed.
  const chooseGpu = (device) => {
    const count = (name, by) => {
      const field = form.elements[`resources.${name}`];
      field.value = Math.max(1, (Number.parseInt(field.value, 10) || 1) + by);
    };
    if (!device.roles.length) count("server_replicas", 1);
    else if (device.roles.includes("trainer")) count("trainer_gpus", -1);
    else {
      count("server_replicas", -1);
      count("trainer_gpus", 1);
    }
    touched = true;
    changed();
  };

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
    showRelevant();
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
    prompts.querySelector(".body").replaceChildren(...answer.prompts.flatMap((prompt, index) => [
      ...(prompt.note && !index ? [element("p", `Shown as messages: ${prompt.note}`, { class: "muted" })] : []),
      element("pre", prompt.text, { class: "prompt", tabindex: "0", "aria-label": `Prompt ${index + 1}` }),
      ...(prompt.tokens === null ? [] : [element("p", `${prompt.tokens} tokens, through the model's chat template`, { class: "help" })]),
    ]));
    showBefore(answer.before);
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
