"use strict";
// The table of cells: filters, sort, columns and cards. Without this script the table is complete, in the order of the plan.
// Texts from outside reach the page through textContent only.
(() => {
  const CHUNK = 200; // rows in the page at a time; scrolling and printing add the others
  const MAX_FACET = 40; // an axis with more values is searched, not ticked
  const table = document.getElementById("cells-table");
  const tools = document.getElementById("cells-tools");
  if (!table || !tools) return;
  const body = table.tBodies[0];
  const sheet = table.closest(".sheet");
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const collator = new Intl.Collator(undefined, { numeric: true });
  const isNull = (value) => value === null || value === undefined;

  function element(name, attributes = {}, ...children) {
    const item = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) item.setAttribute(key, value);
    item.append(...children);
    return item;
  }

  async function read(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).getAttribute("value")), (char) => char.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }

  const valueOf = (row, column) => row.cells[column + 1].firstChild?.textContent.trim() ?? "";

  async function start() {
    const { columns } = await read("table-data");
    const numberOf = new Map(rows.map((row, index) => [row, index]));
    let texts = null; // of rows, in lower case, made for the first search
    let matches = rows;
    let shown = 0;
    let view = { query: "", filters: new Map(), sort: null, isDescending: false, hidden: new Set() };

    // Rows
    function accepts(row) {
      for (const [column, values] of view.filters) if (!values.has(valueOf(row, column))) return false;
      if (!view.query) return true;
      const text = texts[numberOf.get(row)];
      return view.query.toLowerCase().trim().split(/\s+/).every((word) => text.includes(word));
    }

    function compare(a, b) {
      const [left, right] = [a, b].map((row) => columns[view.sort].keys[numberOf.get(row)]);
      if (isNull(left) || isNull(right)) return isNull(left) - isNull(right) || numberOf.get(a) - numberOf.get(b);
      const isNumeric = typeof left === "number" && typeof right === "number";
      const order = isNumeric ? left - right : collator.compare(left, right);
      return (view.isDescending ? -order : order) || numberOf.get(a) - numberOf.get(b);
    }

    function attach(count) {
      const more = matches.slice(shown, count);
      for (const row of more) {
        const head = row.cells[0];
        if (!head.firstElementChild) {
          const number = head.textContent.trim();
          head.replaceChildren(element("a", { href: `#cell-${number}` }, number));
        }
      }
      body.append(...more);
      shown += more.length;
      observer.disconnect();
      if (shown < matches.length) observer.observe(body.lastElementChild);
    }
    const observer = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) attach(shown + CHUNK);
    }, { root: sheet, rootMargin: "400px" });

    function update() {
      if (view.query && !texts) texts = rows.map((row) => [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
      matches = view.query || view.filters.size ? rows.filter(accepts) : [...rows];
      if (view.sort !== null) matches.sort(compare);
      body.replaceChildren();
      shown = 0;
      attach(CHUNK);
      table.setAttribute("aria-rowcount", matches.length + 1);
      counter.textContent = `${matches.length} of ${rows.length} cells`;
      heads.forEach((head, index) => {
        if (view.sort === index - 1) head.setAttribute("aria-sort", view.isDescending ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      sheetOfColumns.replaceSync([...view.hidden].map((column) => `#cells-table :is(th,td):nth-child(${column + 2}){display:none!important}`).join(""));
      for (const box of tools.querySelectorAll("input[type=checkbox]")) {
        const column = Number(box.dataset.column);
        box.checked = "value" in box.dataset ? Boolean(view.filters.get(column)?.has(box.dataset.value)) : !view.hidden.has(column);
      }
      for (const menu of tools.querySelectorAll("details[data-column]")) {
        const chosen = view.filters.get(Number(menu.dataset.column))?.size ?? 0;
        menu.firstElementChild.textContent = columns[menu.dataset.column].name + (chosen ? ` (${chosen})` : "");
      }
      if (search.value !== view.query) search.value = view.query;
    }

    // The fragment of the address holds the view, so that a link shows the same one.
    function save() {
      const state = new URLSearchParams();
      if (view.query) state.set("search", view.query);
      for (const [column, values] of view.filters) for (const value of values) state.append(`only.${columns[column].name}`, value);
      if (view.sort !== null) state.set(view.isDescending ? "down" : "up", columns[view.sort].name);
      for (const column of view.hidden) state.append("hide", columns[column].name);
      history.replaceState(null, "", `#cells?${state}`);
      update();
    }

    function restore() {
      const state = new URLSearchParams(location.hash.startsWith("#cells?") ? location.hash.slice(7) : "");
      const position = (name) => columns.findIndex((column) => column.name === name);
      view = { query: state.get("search") ?? "", filters: new Map(), sort: null, isDescending: state.has("down"), hidden: new Set() };
      for (const [key, value] of state) {
        const column = position(key.startsWith("only.") ? key.slice(5) : value);
        if (column < 0) continue;
        if (key.startsWith("only.")) view.filters.set(column, (view.filters.get(column) ?? new Set()).add(value));
        else if (key === "hide") view.hidden.add(column);
        else if (key === "up" || key === "down") view.sort = column;
      }
      update();
    }

    function valuesOf(row) {
      const number = numberOf.get(row);
      return [number + 1, ...columns.map((column, index) => (column.number ? column.keys[number] ?? null : valueOf(row, index)))];
    }

    // Controls
    const counter = element("p", { role: "status", class: "counter" });
    const search = element("input", { type: "search", id: "cells-search", autocomplete: "off" });
    const sheetOfColumns = new CSSStyleSheet();
    document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheetOfColumns];
    search.addEventListener("input", () => { view.query = search.value; save(); });
    tools.append(element("label", { for: "cells-search" }, "Search"), search);

    function menu(title, entries, attributes = {}) {
      const list = element("ul", {}, ...entries.map(([text, data, change]) => {
        const box = element("input", { type: "checkbox" });
        Object.assign(box.dataset, data);
        box.addEventListener("change", () => { change(box.checked); save(); });
        return element("li", {}, element("label", {}, box, text));
      }));
      tools.append(element("details", { class: "menu", ...attributes }, element("summary", {}, title), list));
    }

    columns.forEach((column, index) => {
      if (!column.facet) return;
      const counts = new Map();
      for (const row of rows) counts.set(valueOf(row, index), (counts.get(valueOf(row, index)) ?? 0) + 1);
      if (counts.size < 2 || counts.size > MAX_FACET) return;
      const entries = [...counts].map(([value, count]) => [` ${value} (${count})`, { column: index, value }, (isOn) => {
        const values = view.filters.get(index) ?? new Set();
        if (isOn) values.add(value); else values.delete(value);
        if (values.size) view.filters.set(index, values); else view.filters.delete(index);
      }]);
      menu(column.name, entries, { "data-column": index });
    });
    menu("Columns", columns.map((column, index) => [` ${column.name}`, { column: index }, (isOn) => {
      if (isOn) view.hidden.delete(index); else view.hidden.add(index);
    }]));
    for (const [title, file, type, textOf] of [
      ["Download CSV", "cells.csv", "text/csv", () => csvOf(columns, matches.map(valuesOf))],
      ["Download JSON", "cells.json", "application/json", () => jsonOf(columns, matches.map(valuesOf))],
    ]) {
      const button = element("button", { type: "button", title: "Cells that match; in seconds, bytes and samples per second" }, title);
      button.addEventListener("click", async () => download(file, type, await textOf()));
      tools.append(button);
    }
    const reset = element("button", { type: "button" }, "Show all");
    reset.addEventListener("click", () => { history.replaceState(null, "", "#cells?"); restore(); });
    tools.append(reset, counter);
    tools.hidden = false;
    const closeMenus = (except) => { for (const open of tools.querySelectorAll("details[open]")) if (open !== except) open.open = false; };
    document.addEventListener("click", (event) => closeMenus(event.target.closest("details.menu")));
    tools.addEventListener("keydown", (event) => {
      const open = event.target.closest("details[open]");
      if (event.key === "Escape" && open) { open.open = false; open.firstElementChild.focus(); }
    });

    heads.slice(1).forEach((head, column) => {
      const button = element("button", { type: "button" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        view.isDescending = view.sort === column && !view.isDescending;
        view.sort = column;
        save();
      });
    });
    addEventListener("hashchange", () => { if (location.hash.startsWith("#cells?")) restore(); else openFromAddress(); });
    addEventListener("beforeprint", () => attach(matches.length));
    restore();
  }

  // Downloads: made in the page, so that they need no network.
  function download(file, type, text) {
    const link = element("a", { href: URL.createObjectURL(new Blob([text], { type })), download: file });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  function csvOf(columns, lines) {
    const quoted = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
    return [["cell", ...columns.map((column) => column.name)], ...lines].map((line) => `${line.map(quoted).join(",")}\r\n`).join("");
  }

  // Values of the table, and everything of the cards: observations, phases, ranks, census, launches, configuration.
  async function jsonOf(columns, lines) {
    if (document.getElementById("card-data")) cards ??= await read("card-data");
    const cells = lines.map(([number, ...values]) => {
      const [title, command, groups] = cards ? cards[number - 1] : readCard(document.getElementById(`cell-${number}`));
      const facts = groups.map(([name, entries]) => [name, entries.map(([key, text, remark]) => ({ name: key, text, remark }))]);
      return { cell: number, title, command, values: Object.fromEntries(columns.map(({ name }, index) => [name, values[index]])),
        facts: Object.fromEntries(facts) };
    });
    return JSON.stringify({ title: document.querySelector("h1").textContent, cells }, null, 1);
  }

  function readCard(card) {
    const groups = [...card.querySelectorAll("table")].map((table) => [table.caption.textContent, [...table.rows].map((row) => {
      const remark = row.cells[1].querySelector("small")?.textContent ?? "";
      const text = row.cells[1].firstChild;
      return [row.cells[0].textContent.trim(), text && text.nodeType === Node.TEXT_NODE ? text.textContent.trim() : "", remark];
    })]);
    return [card.dataset.title, card.querySelector(".command").textContent, groups];
  }

  // Cards
  const opened = document.getElementById("cards-opened");
  let cards = null;

  function copyButton(text) {
    const button = element("button", { type: "button", class: "copy" }, "Copy command");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch { // a page from a file may lack the permission
        const area = element("textarea", { "aria-hidden": "true" });
        area.value = text;
        button.after(area);
        area.select();
        document.execCommand("copy");
        area.remove();
      }
      button.textContent = "Copied";
    });
    return button;
  }

  function addCopyButton(card) {
    const command = card.querySelector(".command");
    command.after(copyButton(command.textContent));
  }

  function build(number, [title, command, groups]) {
    const facts = element("div", { class: "facts" }, ...groups.map(([name, entries]) => element("table", {}, element("caption", {}, name),
      element("tbody", {}, ...entries.map(([key, text, remark]) => element("tr", {}, element("th", { scope: "row" }, key),
        element("td", {}, text, ...(remark ? [" ", element("small", {}, remark)] : []))))))));
    const card = element("details", { class: "card cell-card", id: `cell-${number}` }, element("summary", {}, `${number}: ${title}`),
      element("pre", { class: "command", tabindex: "0" }, element("code", {}, command)), facts);
    addCopyButton(card);
    return card;
  }

  async function openCard(number) {
    let card = document.getElementById(`cell-${number}`);
    if (!card && document.getElementById("card-data")) {
      cards ??= await read("card-data");
      if (!cards[number - 1]) return;
      card = build(number, cards[number - 1]);
      opened.prepend(card);
    }
    if (!card) return;
    card.open = true;
    card.scrollIntoView({ block: "start" });
    card.firstElementChild.focus();
  }

  function openFromAddress() {
    const number = /^#cell-([0-9]+)$/.exec(location.hash);
    if (number) openCard(Number(number[1]));
  }

  for (const card of document.querySelectorAll(".cell-card")) addCopyButton(card);
  body.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#cell-']");
    if (!link) return;
    event.preventDefault();
    openCard(Number(link.textContent));
  });

  document.documentElement.classList.add("script");
  if (typeof DecompressionStream === "undefined") return; // the table stays as it is
  start().then(openFromAddress);
})();
