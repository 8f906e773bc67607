// Tables: sorted by a click on a head, cards at phone width, rows that are kept so that focus and scrolling stay.
import { h, keep, put, setAttributes, write } from "./element.js";

/** Return {element, show(rows), move(by), open()} of a table.

columns: [{title, text(row) | cell(row) -> element, sort(row)?, isNumber?, class?}]; key(row) names a row; onopen(row) is
called for a click or Enter; empty is said where there is no row. label names the table for screen readers. */
export function table({ label, columns, key, onopen, empty = "Nothing yet.", sortBy = null, descending = false }) {
  const order = { column: sortBy, descending };
  let rows = [];
  let at = -1;
  const body = h("tbody");
  const heads = columns.map((column, index) => head(column, index));
  const none = h("p.muted", empty);
  const whole = h("table.cards", { "aria-label": label }, h("thead", h("tr", heads)), body);
  const element = h("div.scroll", { tabindex: 0, role: "region", "aria-label": label }, none, whole);

  function head(column, index) {
    if (!column.sort) return h("th", { scope: "col", class: column.isNumber ? "number" : "" }, column.title);
    const turn = () => {
      order.descending = order.column === index ? !order.descending : Boolean(column.isNumber);
      order.column = index;
      draw();
    };
    return h("th", { scope: "col", class: column.isNumber ? "number" : "" }, h("button.head", { type: "button", onclick: turn }, column.title));
  }

  function sorted() {
    if (order.column === null) return rows;
    const value = columns[order.column].sort;
    const sign = order.descending ? -1 : 1;
    return [...rows].sort((one, other) => sign * compare(value(one), value(other)));
  }

  function cellOf(column, row) {
    const shared = { class: [column.isNumber ? "number" : "", column.class ?? ""].join(" ").trim(), "data-label": column.title };
    return column.cell ? h("td", shared, column.cell(row)) : h("td", shared, column.text(row));
  }

  function make(row) {
    const made = h("tr", onopen ? { tabindex: 0 } : {});
    if (onopen) {
      made.addEventListener("click", (event) => event.target.closest("button, a, input, select") || onopen(made.row));
      made.addEventListener("keydown", (event) => event.key === "Enter" && event.target === made && onopen(made.row));
    }
    return update(made, row);
  }

  function update(made, row) {
    made.row = row;
    columns.forEach((column, index) => {
      const cell = made.children[index];
      if (!cell) made.append(cellOf(column, row));
      else if (column.text) write(cell, column.text(row));
      else if (!cell.contains(document.activeElement)) put(cell, column.cell(row));
    });
    return made;
  }

  function draw() {
    heads.forEach((one, index) => {
      const sort = order.column === index ? (order.descending ? "descending" : "ascending") : null;
      setAttributes(one, { "aria-sort": sort });
    });
    keep(body, sorted(), key, make, update);
    none.hidden = rows.length > 0;
    whole.hidden = rows.length === 0;
  }

  draw();
  return {
    element,
    show(next) {
      rows = next;
      draw();
    },
    move(by) {
      at = Math.max(0, Math.min(body.children.length - 1, at + by));
      body.children[at]?.focus();
    },
  };
}

function compare(one, other) {
  const isMissing = (value) => value === null || value === undefined || Number.isNaN(value);
  if (isMissing(one) || isMissing(other)) return isMissing(one) - isMissing(other);
  return typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other));
}
