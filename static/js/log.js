// Tails a log in pieces, and searches all of it. Keeps a bounded number of lines, whatever the size of the file.
(() => {
  const MAX_LINES = 8000;
  const box = document.getElementById("log");
  if (!box) return;
  const lines = document.getElementById("log-lines");
  const partial = document.getElementById("log-partial");
  const older = document.getElementById("log-older");
  const status = document.getElementById("log-status");
  const filter = document.getElementById("log-filter");
  const follow = document.getElementById("log-follow");
  const hits = document.getElementById("log-hits");
  const newer = document.getElementById("log-newer");
  const MOST_HITS = 1000;
  let tailing = true; // false while looking at a place in the middle
  let searching = 0;
  let first = 0;
  let last = null;
  let live = true;

  const get = async (query) => {
    const answer = await fetch(box.dataset.url + query, { headers: { Accept: "application/json" } });
    if (!answer.ok || answer.redirected) throw new Error(`the studio answered ${answer.status}`);
    return answer.json();
  };
  const matches = (text) => text.toLowerCase().includes(filter.value.trim().toLowerCase());
  const level = (text) => {
    if (/\b(ERROR|CRITICAL|Traceback|Exception)\b|Error:/.test(text)) return "error";
    return /\bWARN(ING)?\b/.test(text) ? "warning" : "";
  };
  const lineElements = (text) => {
    const fragment = document.createDocumentFragment();
    for (const line of text.replace(/\n$/, "").split("\n")) {
      const element = document.createElement("div");
      element.textContent = line || " ";
      element.className = level(line);
      element.hidden = !matches(line);
      fragment.append(element);
    }
    return fragment;
  };
  const complain = (error) => { status.textContent = `Can't read the log: ${error.message}.`; };
  const size = (bytes) => bytes < 1048576 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 1048576).toFixed(1)} MiB`;
  const show = (piece) => {
    if (piece.text) lines.append(lineElements(piece.text));
    while (lines.childElementCount > MAX_LINES) { lines.firstElementChild.remove(); first = null; }
    partial.textContent = piece.partial;
    partial.hidden = !matches(piece.partial);
    last = piece.end;
    live = piece.live;
    older.hidden = !first;
    newer.hidden = tailing;
    status.textContent = `${size(piece.size)}${live ? ", live" : ""}`;
    if (tailing && follow.checked) box.scrollTop = box.scrollHeight;
  };

  // ---- a place in the middle

  const goTo = async (at) => {
    tailing = false;
    filter.value = "";
    const piece = await get(`&after=${at}`);
    lines.replaceChildren();
    first = at;
    show(piece);
    lines.firstElementChild?.classList.add("hit");
    box.scrollTop = 0;
  };
  const goOn = async () => {
    const piece = await get(`&after=${last}`);
    tailing = piece.end >= piece.size || !piece.text;
    show(piece);
  };
  newer.addEventListener("click", () => goOn().catch(complain));

  // ---- search in the whole file, piece by piece

  const search = async (words) => {
    searching += 1;
    const mine = searching;
    hits.replaceChildren();
    hits.hidden = !words;
    let at = 0;
    let found = 0;
    while (words && at !== null) {
      const answer = await get(`&search=${encodeURIComponent(words)}&after=${at}`);
      if (mine !== searching) return; // another search has begun
      for (const [start, text] of answer.lines) {
        const hit = document.createElement("button");
        hit.type = "button";
        hit.textContent = text || " ";
        hit.addEventListener("click", () => goTo(start).catch(complain));
        hits.append(hit);
      }
      found += answer.lines.length;
      at = found < MOST_HITS ? answer.next : null;
      const share = answer.next === null ? "" : `, ${Math.floor((100 * answer.next) / answer.size)} % searched`;
      status.textContent = `${found} ${found === 1 ? "line" : "lines"} with “${words}” in the whole log${share}${at === null && answer.next !== null ? "; the search stops here" : ""}`;
    }
  };
  filter.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      search(filter.value.trim()).catch(complain);
    }
  });
  filter.addEventListener("input", () => { if (!filter.value) search(""); });

  older.addEventListener("click", async () => {
    const piece = await get(`&before=${first}`);
    const height = box.scrollHeight;
    lines.prepend(lineElements(piece.text));
    first = piece.start;
    older.hidden = !first;
    box.scrollTop += box.scrollHeight - height;
  });
  filter.addEventListener("input", () => {
    for (const line of lines.children) line.hidden = !matches(line.textContent);
    partial.hidden = !matches(partial.textContent);
  });
  box.addEventListener("wheel", (event) => { if (event.deltaY < 0) follow.checked = false; }, { passive: true });
  follow.addEventListener("change", () => { if (follow.checked) box.scrollTop = box.scrollHeight; });

  const poll = async () => {
    let pause = live ? 1500 : 15000;
    try {
      if (last === null) {
        const piece = await get("");
        first = piece.start;
        show(piece);
      } else if (tailing && !document.hidden) {
        const piece = await get(`&after=${last}`);
        if (tailing) { // nobody went elsewhere meanwhile
          if (piece.start < last) lines.replaceChildren();
          show(piece);
          if (piece.end < piece.size && piece.text) pause = 50;
        }
      }
    } catch (error) {
      status.textContent = `Can't read the log: ${error.message}; trying again.`;
      pause = 5000;
    }
    setTimeout(poll, pause);
  };
  poll();
})();
