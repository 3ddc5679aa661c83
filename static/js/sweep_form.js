// The form of a sweep: rows come and go, and only what matters for a kind of row is shown.
"use strict";

(() => {
  const form = document.getElementById("sweep-form");
  if (!form) return;
  const axes = document.getElementById("axes");
  const template = document.getElementById("axis-template");

  const show = () => {
    for (const row of axes.querySelectorAll("[data-axis-row]")) row.dataset.kind = row.querySelector("[data-axis-kind]").value;
    const method = form.querySelector("input[name=method]:checked").value;
    for (const part of form.querySelectorAll("[data-for-method]")) part.hidden = part.dataset.forMethod !== method;
  };
  const changed = () => {
    show();
    form.dispatchEvent(new CustomEvent("axis-change"));
  };

  form.addEventListener("change", changed);
  form.addEventListener("click", (event) => {
    if (event.target.closest("[data-add-axis]")) {
      const index = 1 + Math.max(-1, ...[...axes.children].map((row) => Number(row.dataset.axisRow)));
      const made = document.createElement("div");
      made.innerHTML = template.innerHTML.replaceAll("__index__", String(index));
      axes.append(made.firstElementChild);
      axes.lastElementChild.querySelector("input").focus();
      changed();
    }
    const remove = event.target.closest("[data-remove-axis]");
    if (remove) {
      remove.closest("[data-axis-row]").remove();
      changed();
    }
  });
  // Another base has other rewards, so the list of settings comes anew.
  document.getElementById("id_base").addEventListener("change", async (event) => {
    const answer = await fetch(`${location.pathname}?from=${encodeURIComponent(event.target.value)}`);
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.getElementById("paths").replaceChildren(...page.getElementById("paths").children);
  });
  show();
})();
