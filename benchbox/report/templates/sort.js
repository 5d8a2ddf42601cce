"use strict";
// Without this script the table is complete, in the order of the plan.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.sort;
      const number = head.classList.contains("number");
      const rows = [...table.tBodies[0].rows].sort((a, b) =>
        number ? Number(key(a)) - Number(key(b)) : key(a).localeCompare(key(b), undefined, { numeric: true }));
      table.tBodies[0].append(...(down ? rows.reverse() : rows));
    });
  });
}
