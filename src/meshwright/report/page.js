// The script of pages with sortable tables: sort, filter, show more rows, save as CSV. It loads nothing.
//
// Rows of a long table are JSON, compressed by gzip and in base64, and unpacked when they are first needed: a page of
// 80,000 rows opens quickly and is a tenth of the size.
'use strict';
for (const box of document.querySelectorAll('.table[data-name]')) {
  const table = box.querySelector('table'), body = table.tBodies[0], held = box.querySelector('script');
  const heads = [...table.tHead.rows[0].cells];
  const classes = heads.map(h => h.className);
  const names = heads.map(h => h.textContent.trim());
  const total = +box.dataset.rows;
  let rows, kept, wanted = '', shown = body.rows.length;
  const unpacked = async () => {
    const bytes = Uint8Array.from(atob(held.textContent), c => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
    return new Response(stream).json();
  };
  const read = async () => {
    const plain = cell => cell.textContent.replaceAll('\u00a0', ' ');
    rows ??= held ? await unpacked() : [...body.rows].map(r => [...r.cells].map(plain));
    kept = wanted ? rows.filter(row => row.some(text => text.toLowerCase().includes(wanted))) : rows;
  };
  const units = {s: 1, ms: 1e-3, us: 1e-6, '\u00b5s': 1e-6, min: 60, h: 3600, days: 86400, B: 1, KiB: 1024,
    MiB: 1048576, GiB: 1073741824, TiB: 1099511627776};
  const number = text => {
    const m = /^[+\u2212-]?[\d,]*\.?\d+(?:e[+-]?\d+)?/i.exec(text.trim());
    if (!m) return NaN;
    const unit = text.trim().slice(m[0].length).trim().split(/[\s,]/)[0];
    return parseFloat(m[0].replace(/,/g, '').replace('\u2212', '-')) * (units[unit] || 1);
  };
  const unbroken = text => text.replace(/(?<=\d) (?=(?:%|[nm\u00b5]?s|min|h|days|[KMGTP]i?B|USD)(?![\w/]))/g, '\u00a0');
  const count = n => n.toLocaleString('en');
  const draw = async () => {
    await read();
    const some = document.createDocumentFragment();
    for (const row of kept.slice(0, shown)) {
      const tr = document.createElement('tr');
      row.forEach((text, i) => {
        const td = document.createElement('td');
        td.textContent = unbroken(text);
        if (classes[i]) td.className = classes[i];
        tr.append(td);
      });
      some.append(tr);
    }
    body.replaceChildren(some);
    const drawn = body.rows.length;
    table.caption.textContent = box.dataset.name
      + (drawn < total ? ` (${count(drawn)} of ${count(kept.length)} rows` + (wanted ? ' that match)' : ')') : '');
    if (more) more.hidden = drawn === kept.length;
  };
  heads.forEach((head, i) => head.querySelector('button').addEventListener('click', async () => {
    const up = head.getAttribute('aria-sort') !== 'ascending';
    heads.forEach(h => h.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    await read();
    const keyed = rows.map(row => [number(row[i]), row[i], row]);
    const numeric = keyed.every(k => !Number.isNaN(k[0]) || k[1].trim() === '');
    keyed.sort((a, b) => {
      if (!a[1].trim() || !b[1].trim()) return !a[1].trim() - !b[1].trim();
      const order = numeric ? a[0] - b[0] : a[1].localeCompare(b[1], 'en', {numeric: true});
      return up ? order : -order;
    });
    rows = keyed.map(k => k[2]);
    await draw();
  }));
  const actions = document.createElement('div');
  actions.className = 'actions';
  const action = (text, run) => {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = text;
    button.addEventListener('click', run);
    actions.append(button);
    return button;
  };
  let more;
  const step = 1000;
  if (held) {
    const label = document.createElement('label'), field = document.createElement('input');
    field.type = 'search';
    label.append('Rows with ', field);
    field.addEventListener('input', () => {
      wanted = field.value.trim().toLowerCase();
      draw();
    });
    actions.append(label);
    table.caption.ariaLive = 'polite';
    more = action('Show ' + count(Math.min(step, total - shown)) + ' more rows', () => {
      shown += step;
      draw();
    });
  }
  action('Save as CSV', async () => {
    const cell = t => /[",\n]/.test(t) ? '"' + t.replace(/"/g, '""') + '"' : t;
    await read();
    const text = [names, ...kept].map(r => r.map(cell).join(',')).join('\n') + '\n';
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([text], {type: 'text/csv'}));
    link.download = box.dataset.name.replace(/[^\w.-]+/g, '-').toLowerCase() + '.csv';
    link.click();
    URL.revokeObjectURL(link.href);
  });
  box.after(actions);
}
