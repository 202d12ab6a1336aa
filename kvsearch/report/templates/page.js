"use strict";
(() => {
  const all = (what, where = document) => [...where.querySelectorAll(what)];
  const root = document.documentElement;

  // light and dark: as the system has it, until somebody chooses
  const theme = document.getElementById("theme"), themes = ["auto", "light", "dark"];
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || "auto") + 1) % themes.length];
    if (next === "auto") delete root.dataset.theme; else root.dataset.theme = next;
    theme.textContent = `theme: ${next}`;
  });

  // tables: a click on a heading sorts, a second one the other way round; rows stay in their groups
  const key = (row, column) => {
    const cell = row.cells[column], text = cell ? cell.dataset.v || cell.textContent.trim() : "";
    return text === "" || Number.isNaN(Number(text)) ? null : Number(text);
  };
  const sort = (heading) => {
    const table = heading.closest("table"), column = heading.cellIndex;
    const up = heading.ariaSort === "descending" || (heading.ariaSort === null && column === 0);
    all("th[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((row) => !row.classList.contains("head"));
      rows.sort((one, two) => {
        const a = key(one, column), b = key(two, column);
        if (a === null && b === null) {
          const words = (row) => (row.cells[column] || {}).textContent || "";
          return words(one).localeCompare(words(two), "en", { numeric: true }) * (up ? 1 : -1);
        }
        return a === null ? 1 : b === null ? -1 : (a - b) * (up ? 1 : -1);
      });
      body.append(...rows);
    }
  };
  all("thead th").forEach((heading) => heading.addEventListener("click", () => sort(heading)));

  // commands: copied as they are
  for (const button of all(".copy")) {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("pre").textContent;
      try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { button.textContent = "select it"; }
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }
  addEventListener("beforeprint", () => all("details").forEach((one) => { one.open = true; }));
})();
