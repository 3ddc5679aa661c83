// Source of codemirror.min.js: a Python editor over a textarea, which stays in the form and keeps its value.
// README.md beside this file says how the bundle is built.
import { basicSetup } from "codemirror";
import { indentWithTab } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { HighlightStyle, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { lintGutter, setDiagnostics } from "@codemirror/lint";
import { EditorState } from "@codemirror/state";
import { EditorView, keymap } from "@codemirror/view";
import { tags } from "@lezer/highlight";

const look = EditorView.theme({
  "&": { backgroundColor: "var(--surface)", color: "var(--text)", fontSize: "13px" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.55" },
  ".cm-content": { caretColor: "var(--text)" },
  ".cm-cursor": { borderLeftColor: "var(--text)" },
  ".cm-gutters": { backgroundColor: "var(--surface-2)", color: "var(--muted)", borderRight: "1px solid var(--line)" },
  ".cm-activeLine": { backgroundColor: "var(--row-hover)" },
  ".cm-activeLineGutter": { backgroundColor: "var(--row-hover)", color: "var(--text)" },
  "&.cm-focused": { outline: "2px solid var(--focus)", outlineOffset: "1px" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": {
    backgroundColor: "var(--selection) !important",
  },
  ".cm-matchingBracket": { backgroundColor: "var(--selection) !important" },
  ".cm-tooltip": { backgroundColor: "var(--surface)", color: "var(--text)", border: "1px solid var(--line-strong)" },
  ".cm-panels": { backgroundColor: "var(--surface-2)", color: "var(--text)" },
  ".cm-tooltip-autocomplete ul li[aria-selected]": { backgroundColor: "var(--accent)", color: "var(--on-accent)" },
});

const colours = HighlightStyle.define([
  { tag: [tags.keyword, tags.operatorKeyword, tags.controlKeyword, tags.definitionKeyword], color: "var(--code-keyword)" },
  { tag: [tags.string, tags.special(tags.string)], color: "var(--code-string)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--code-number)" },
  { tag: tags.comment, color: "var(--muted)", fontStyle: "italic" },
  { tag: [tags.function(tags.definition(tags.variableName)), tags.className], color: "var(--code-name)" },
]);

// {onChange(text)}; returns {showProblems([{line, message}])}, with lines counted from 1.
export function attach(textarea, { onChange, label }) {
  const changed = EditorView.updateListener.of((update) => {
    if (!update.docChanged) return;
    textarea.value = update.state.doc.toString();
    onChange(textarea.value);
  });
  const view = new EditorView({
    state: EditorState.create({
      doc: textarea.value,
      extensions: [
        basicSetup, keymap.of([indentWithTab]), python(), indentUnit.of("    "), lintGutter(), look,
        syntaxHighlighting(colours), changed, EditorView.contentAttributes.of({ "aria-label": label }),
      ],
    }),
  });
  textarea.after(view.dom);
  textarea.hidden = true;
  textarea.required = false;
  const showProblems = (problems) => {
    const { doc } = view.state;
    const diagnostics = problems.map(({ line, message }) => {
      const at = doc.line(Math.min(Math.max(line || 1, 1), doc.lines));
      return { from: at.from, to: at.to, severity: "error", message };
    });
    view.dispatch(setDiagnostics(view.state, diagnostics));
  };
  return { view, showProblems };
}
