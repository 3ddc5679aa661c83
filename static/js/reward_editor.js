// The reward editor: CodeMirror over the textarea, problems by line while somebody types, and the choice of what to try on.
(() => {
  const form = document.getElementById("reward-form");
  const textarea = form.querySelector("textarea[data-editor]");

  const showChoice = () => {
    const on = form.elements.on.value;
    for (const part of form.querySelectorAll("[data-on]")) part.hidden = part.dataset.on !== on;
  };
  form.addEventListener("change", showChoice);
  showChoice();
  if (!textarea) return;

  const list = document.getElementById("source-problems");
  let timer = null;
  let request = null;
  let editor = null;
  let saved = textarea.value;
  const validate = async () => {
    request?.abort();
    request = new AbortController();
    const body = new FormData();
    body.set("source", textarea.value);
    body.set("csrfmiddlewaretoken", form.elements.csrfmiddlewaretoken.value);
    try {
      const answer = await fetch(form.dataset.validateUrl, { method: "POST", body, signal: request.signal });
      if (!answer.ok || answer.redirected) throw new Error(`the studio answered ${answer.status}`);
      const { problems } = await answer.json();
      editor.showProblems(problems);
      list.replaceChildren(...problems.map(({ line, message }) => {
        const item = document.createElement("li");
        item.textContent = line ? `Line ${line}: ${message}` : message;
        return item;
      }));
    } catch (error) {
      if (error.name !== "AbortError") list.textContent = `Can't check: ${error.message}.`;
    }
  };
  const onChange = () => {
    clearTimeout(timer);
    timer = setTimeout(validate, 400);
  };
  editor = window.OffbeatEditor.attach(textarea, { onChange, label: "Python source" });
  editor.view.contentDOM.tabIndex = 0; // what scrolls can be reached by keyboard, and is seen to be
  form.querySelector("label[for=id_source]").addEventListener("click", () => editor.view.focus());

  form.addEventListener("submit", () => { saved = textarea.value; });
  addEventListener("beforeunload", (event) => { if (textarea.value !== saved) event.preventDefault(); });
})();
