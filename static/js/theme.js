// Puts the theme on <html> before anything is drawn: the stored choice, or what the system asks for.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => localStorage.getItem("theme");
  const apply = () => {
    document.documentElement.dataset.theme = stored() || (system.matches ? "dark" : "light");
  };
  apply();
  system.addEventListener("change", apply);
  addEventListener("storage", apply);
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-theme-toggle]")) {
      localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    } else if (event.target.closest("[data-theme-system]")) {
      localStorage.removeItem("theme");
    } else {
      return;
    }
    apply();
  });
})();
