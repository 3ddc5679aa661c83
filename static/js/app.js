// What every page has: relative times, menus, confirmation, copying, and manners for htmx polling.
(() => {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const relative = (seconds) => {
    const size = Math.abs(seconds);
    if (size < 5) return "just now";
    const [unit, length] = units.find(([, length]) => size >= length);
    const text = `${Math.floor(size / length)} ${unit}`;
    return seconds < 0 ? `in ${text}` : `${text} ago`;
  };
  const showTimes = (root) => {
    for (const time of root.querySelectorAll("time[data-ago]")) {
      time.textContent = relative((Date.now() - Date.parse(time.dateTime)) / 1000);
    }
  };
  // How long something has been going on, as the server's "duration" filter writes it.
  const two = (number) => String(number).padStart(2, "0");
  const duration = (seconds) => {
    if (seconds < 60) return `${seconds} s`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
    if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${two(Math.floor(seconds % 3600 / 60))} min`;
    return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
  };
  const showDurations = (root) => {
    for (const element of root.querySelectorAll("[data-since]")) {
      element.textContent = duration(Math.max(0, Math.floor((Date.now() - Date.parse(element.dataset.since)) / 1000)));
    }
  };
  // A table that is wider than its box is moved by keyboard too: where nothing in it takes the focus, the box does.
  const reachTables = () => {
    for (const box of document.querySelectorAll(".table-wrap")) {
      const wide = box.scrollWidth > box.clientWidth;
      if (!wide || box.querySelector("a, button, input, select, summary")) continue;
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", box.closest("section, .panel")?.querySelector("h2, h3")?.textContent || "Table");
    }
  };
  reachTables();
  addEventListener("resize", reachTables);
  document.addEventListener("htmx:afterSettle", reachTables);
  showTimes(document);
  showDurations(document);
  setInterval(() => showTimes(document), 5000);
  setInterval(() => showDurations(document), 1000);

  // Menus close on a click elsewhere and on Escape.
  const closeMenus = (except) => {
    for (const menu of document.querySelectorAll("details.menu[open]")) if (menu !== except) menu.open = false;
  };
  document.addEventListener("click", (event) => closeMenus(event.target.closest("details.menu")));

  // A form with data-confirm asks first.
  const dialog = document.getElementById("confirm");
  document.addEventListener("submit", (event) => {
    const source = event.submitter?.dataset.confirm ? event.submitter : event.target;
    const question = source.dataset.confirm;
    if (!question || event.target.dataset.confirmed) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    dialog.querySelector("p").textContent = question;
    dialog.querySelector("[value=yes]").textContent = source.dataset.confirmYes || "Yes";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "yes") return;
      event.target.dataset.confirmed = "1";
      event.submitter?.removeAttribute("formaction"); // the page that asks where no script runs
      event.target.requestSubmit(event.submitter);
      delete event.target.dataset.confirmed;
    }, { once: true });
  }, true);

  // data-copy names the element whose text goes to the clipboard.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const source = document.querySelector(button.dataset.copy);
    await navigator.clipboard.writeText(source.value ?? source.textContent);
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = before; }, 1500);
  });

  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-submit-on-change]")) event.target.form.requestSubmit();
    if (event.target.matches("[data-check-all]")) {
      for (const box of document.querySelectorAll(`input[name="${event.target.dataset.checkAll}"]`)) {
        box.checked = event.target.checked;
      }
    }
  });

  const keys = document.getElementById("keys");
  document.addEventListener("click", (event) => { if (event.target.closest("[data-show-keys]")) keys.showModal(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") closeMenus();
    const typing = event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key === "?" && !typing) keys.showModal();
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      const search = document.querySelector("input[type=search]");
      if (search) { event.preventDefault(); search.focus(); search.select(); }
    }
  });

  // Polling rests while the tab is hidden, says so when the studio is gone, and goes to the login page after a sign-out.
  const lost = document.getElementById("connection-lost");
  document.addEventListener("htmx:beforeRequest", (event) => {
    const trigger = event.detail.elt.getAttribute("hx-trigger") || "";
    if (document.hidden && trigger.includes("every")) event.preventDefault();
  });
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (new URL(event.detail.xhr.responseURL || location.href).pathname.endsWith("/login/")) {
      event.detail.shouldSwap = false;
      location.reload();
    }
  });
  // A table that is swapped keeps what was chosen in it.
  let chosen = new Set();
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (!event.detail.target.matches("[data-keep-checked]")) return;
    chosen = new Set([...event.detail.target.querySelectorAll("input:checked")].map((box) => box.value));
  });
  document.addEventListener("htmx:afterSwap", () => {
    for (const box of document.querySelectorAll("[data-keep-checked] input[type=checkbox]")) {
      if (chosen.has(box.value) && box.name) box.checked = true;
    }
  });
  document.addEventListener("htmx:sendError", () => { lost.hidden = false; });
  document.addEventListener("htmx:afterRequest", (event) => { if (event.detail.xhr.status) lost.hidden = true; });
  document.addEventListener("htmx:afterSwap", () => { showTimes(document); showDurations(document); });
})();
