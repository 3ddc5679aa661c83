// Checkpoints: digests on demand, since a large file takes a while to read; the model card's text when it is opened.
(() => {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-sha]");
    if (!button) return;
    button.disabled = true;
    button.textContent = "Reading…";
    try {
      const answer = await fetch(button.dataset.sha);
      if (!answer.ok) throw new Error(`the studio answered ${answer.status}`);
      button.replaceWith((await answer.json()).sha256);
    } catch (error) {
      button.disabled = false;
      button.textContent = `SHA-256 (not read: ${error.message})`;
    }
  });
  document.addEventListener("toggle", async (event) => {
    const card = event.target.querySelector?.("[data-card]:empty");
    if (!card || !event.target.open) return;
    try {
      const answer = await fetch(card.dataset.card);
      if (!answer.ok) throw new Error(`the studio answered ${answer.status}`);
      card.textContent = await answer.text();
    } catch (error) {
      card.textContent = `Can't be shown: ${error.message}.`;
    }
  }, true);
})();
