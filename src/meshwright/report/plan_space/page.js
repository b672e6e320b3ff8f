'use strict';
// Plans are columns of numbers (see page_data); a plan is its index. Text reaches the page as textContent only.
const data = JSON.parse(document.getElementById('plans').textContent);
const count = data.plan.length, every = [...Array(count).keys()];
const $ = id => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// --- values of a plan ---
const field = (name, i) => data.fields[name][0][data.fields[name][1][i]];
const rate = i => data.tokens_per_device / data.step_s[i];
const mfu = i => rate(i) * data.mfu_per_rate;
const parts = i => Object.keys(data.components).map(n => [n, data.components[n][i]]).filter(p => p[1]);
const families = i => {
  const sums = {};
  for (const [name, s] of parts(i)) sums[data.families[name]] = (sums[data.families[name]] || 0) + s;
  return Object.entries(sums).sort((a, b) => b[1] - a[1]);
};
const boundBy = i => {
  const [[first, s]] = families(i), whole = data.step_s[i];
  const other = parts(i).filter(p => data.families[p[0]] !== 'compute').sort((a, b) => b[1] - a[1])[0];
  const rest = other && other[1] >= .03 * whole ? `, ${data.labels[other[0]]} ${Math.round(100 * other[1] / whole)} %` : '';
  return `${first} ${Math.round(100 * s / whole)} %${rest}`;
};

// --- numbers as text ---
const fixed = (x, digits) => x.toLocaleString('en', {minimumFractionDigits: digits, maximumFractionDigits: digits});
const digits = x => fixed(x, Math.abs(x) < 10 ? 3 : Math.abs(x) < 100 ? 2 : Math.abs(x) < 1000 ? 1 : 0);
const seconds = s => s === 0 ? '0 s' : Math.abs(s) >= 1 ? `${digits(s)} s` : Math.abs(s) >= 1e-3 ? `${digits(1e3 * s)} ms`
  : `${digits(1e6 * s)} \u00b5s`;
const rateText = x => Math.abs(x) >= 100 ? fixed(x, 0) : digits(x);
const percent = x => `${fixed(100 * x, 1)} %`;
const interval = i => `${rateText(rate(i) / data.spread[i])} to ${rateText(rate(i) * data.spread[i])}`;
const signed = (x, text) => x === 0 ? '0' : (x > 0 ? '+' : '\u2212') + text(Math.abs(x));

// --- state ---
const frontier = every.filter(i => data.front[i]);
const pair = [0, frontier.length > 1 ? frontier[1] : count > 1 ? 1 : null]; // at first the fastest, and the next that needs less memory
const firstRows = matchMedia('(max-width: 40rem)').matches ? 15 : 50;
let shown = every, sorting = {key: 'rank', up: true}, limit = firstRows, hovered = null, next = 0;
const select = (i, side = next) => {
  if (pair[1 - side] === i) pair[1 - side] = pair[side];
  pair[side] = i;
  next = 1 - side;
  drawPair();
  drawList();
  drawScatter();
};

// --- filters ---
const form = $('filters');
const names = {data_shard: 'sharded over', data_replicate: 'replicas', micro_batch: 'micro-batch', virtual_pipeline: 'virtual stages',
  recompute_modules: 'recomputed modules', recompute_layers: 'recomputed layers', expert_tensor: 'expert tensor',
  sequence_parallel: 'sequence parallel', layers_per_stage: 'layers per stage'};
const title = name => names[name] || name.replaceAll('_', ' ');
const varied = Object.keys(data.fields).filter(name => data.fields[name][0].length > 1);
const ordered = name => data.fields[name][0].map((word, k) => [word, k])
  .sort((a, b) => typeof a[0] === 'number' && typeof b[0] === 'number' ? a[0] - b[0] : String(a[0]).localeCompare(String(b[0]), 'en', {numeric: true}));
const wording = word => word === '' ? 'none' : word === true ? 'yes' : word === false ? 'no' : String(word);
for (const name of varied) {
  const choice = make('select', {name});
  choice.append(make('option', {value: '', textContent: 'any'}));
  for (const [word, k] of ordered(name)) choice.append(make('option', {value: String(k), textContent: wording(word)}));
  $('degrees').append(make('label', {}, title(name)[0].toUpperCase() + title(name).slice(1) + ' ', choice));
}
form.color.append(make('option', {value: '', textContent: 'bound'}));
for (const name of varied.filter(n => data.fields[n][0].length <= 8)) form.color.append(make('option', {value: name, textContent: title(name)}));

if (new Set(every.map(i => families(i)[0][0])).size === 1) {
  form.color.value = ['pipeline', 'tensor', 'context', 'sharding'].find(n => [...form.color.options].some(o => o.value === n)) || '';
}

const filter = () => {
  const words = form.text.value.toLowerCase().split(/\s+/).filter(Boolean);
  const gib = parseFloat(form.gib.value), step = parseFloat(form.step.value), front = form.front.checked;
  const fields = varied.map(name => [data.fields[name][1], form.elements[name].value]).filter(f => f[1] !== '').map(f => [f[0], +f[1]]);
  shown = every.filter(i => (!front || data.front[i]) && !(data.gib[i] > gib) && !(data.step_s[i] > step)
    && fields.every(([column, k]) => column[i] === k)
    && (!words.length || words.every(w => data.plan[i].toLowerCase().split(' ').some(part => part.startsWith(w)))));
  hovered = null;
  $('count').textContent = `${shown.length.toLocaleString('en')} of ${count.toLocaleString('en')} plans`;
  order();
  drawList();
  drawScatter();
};
form.addEventListener('input', () => { limit = firstRows; filter(); });
form.addEventListener('reset', () => setTimeout(filter)); // after the fields have their first values again
form.addEventListener('submit', event => event.preventDefault());

// --- the table ---
const columns = [
  ['compare', null, null, ''], ['rank', i => i, i => String(i + 1), 'optional'],
  ['plan', i => data.plan[i], i => data.plan[i], 'text plan'], ['step', i => data.step_s[i], i => seconds(data.step_s[i]), ''],
  ['tokens/s/device', i => -data.step_s[i], i => rateText(rate(i)), ''], ['80 % interval', i => data.spread[i], interval, 'optional'],
  ['MFU', mfu, i => percent(mfu(i)), 'optional'], ['GiB', i => data.gib[i], i => fixed(data.gib[i], 1), ''],
  ['bound by', boundBy, boundBy, 'text optional'],
];
const order = () => {
  const key = columns.find(c => c[0] === sorting.key)[1], sign = sorting.up ? 1 : -1;
  const keyed = shown.map(i => [key(i), i]);
  keyed.sort((a, b) => (typeof a[0] === 'string' ? a[0].localeCompare(b[0], 'en', {numeric: true}) : a[0] - b[0]) * sign || a[1] - b[1]);
  shown = keyed.map(k => k[1]);
};
const listing = make('table', {}, make('caption', {className: 'unseen', textContent: 'Scored plans'}));
const heads = make('tr');
for (const [name, key, , kind] of columns) {
  const head = make('th', {scope: 'col', className: kind});
  if (!key) head.append(make('span', {className: 'unseen', textContent: name}));
  else head.append(make('button', {type: 'button', textContent: name, onclick: () => {
    const falls = ['tokens/s/device', 'MFU'].includes(name); // the first press shows the best
    sorting = {key: name, up: sorting.key === name ? !sorting.up : !falls};
    order();
    drawList();
  }}));
  heads.append(head);
}
const body = make('tbody');
listing.append(make('thead', {}, heads), body);
const more = make('button', {type: 'button', className: 'more', onclick: () => { limit += 200; drawList(); }});
const save = make('button', {type: 'button', className: 'more', textContent: 'Save these as CSV', onclick: () => saveCsv()});
const none = make('p', {className: 'hint', textContent: 'No plan passes these filters.'});
const sides = i => ['A', 'B'].map((letter, side) => make('button', {type: 'button', textContent: letter, className: side ? 'b' : '',
  ariaPressed: String(pair[side] === i), ariaLabel: `Compare as plan ${letter}: ${data.plan[i]}`, onclick: event => {
    const row = event.target.closest('tr');
    const at = [...body.rows].indexOf(row);
    select(i, side);
    body.rows[at]?.querySelectorAll('.pick button')[side]?.focus({preventScroll: true});
  }}));
const drawList = () => {
  [...heads.cells].forEach((head, k) => columns[k][0] === sorting.key
    ? head.setAttribute('aria-sort', sorting.up ? 'ascending' : 'descending') : head.removeAttribute('aria-sort'));
  body.replaceChildren(...shown.slice(0, limit).map(i => {
    const row = make('tr', {className: data.front[i] ? 'front' : ''});
    for (const [, key, text, kind] of columns) {
      row.append(key ? make('td', {className: kind, textContent: text(i).replaceAll(' %', '\u00a0%')}) : make('td', {className: 'pick'}, ...sides(i)));
    }
    return row;
  }));
  listing.hidden = save.hidden = !shown.length;
  none.hidden = shown.length > 0;
  more.hidden = shown.length <= limit;
  more.textContent = `Show more (${Math.min(limit, shown.length).toLocaleString('en')} of ${shown.length.toLocaleString('en')})`;
};
const saveCsv = () => {
  const cell = value => /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value;
  const fields = Object.keys(data.fields), times = Object.keys(data.components), memory = Object.keys(data.memory);
  const lines = [['rank', 'plan', 'step_s', 'step_s_low', 'step_s_high', 'tokens_per_s_per_device', 'mfu_ratio', 'reserved_gib', 'on_front',
    ...fields, ...times.map(n => `${n}_s`), ...memory.map(n => `${n.replaceAll(' ', '_')}_gib`)]];
  for (const i of shown) lines.push([i + 1, data.plan[i], data.step_s[i], data.step_s[i] / data.spread[i], data.step_s[i] * data.spread[i],
    rate(i), mfu(i), data.gib[i], data.front[i], ...fields.map(n => field(n, i)), ...times.map(n => data.components[n][i]),
    ...memory.map(n => data.memory[n][i])]);
  const url = URL.createObjectURL(new Blob([lines.map(l => l.map(cell).join(',')).join('\n') + '\n'], {type: 'text/csv'}));
  make('a', {href: url, download: 'plans.csv'}).click();
  URL.revokeObjectURL(url);
};

// --- two plans ---
const copies = i => {
  const box = make('div', {className: 'copies'}), details = make('div');
  const offer = (name, text) => {
    if (!text) return;
    const said = make('span', {ariaLive: 'polite'});
    box.append(make('button', {type: 'button', textContent: `Copy ${name}`, onclick: async () => {
      try { await navigator.clipboard.writeText(text); said.textContent = 'copied'; }
      catch { said.textContent = copyOld(text) ? 'copied' : 'not possible here: it stands below'; }
    }}), said);
    details.append(make('details', {}, make('summary', {textContent: `The ${name}`}), make('pre', {textContent: text})));
  };
  offer('run file', runFile(i));
  offer('command', command(i));
  return [box, details];
};
const copyOld = text => {
  const area = make('textarea', {value: text});
  document.body.append(area);
  area.select();
  const done = document.execCommand('copy');
  area.remove();
  return done;
};
const flow = value => Array.isArray(value) ? `[${value.map(flow).join(', ')}]`
  : value !== null && typeof value === 'object' ? `{${Object.entries(value).map(([k, v]) => `${k}: ${flow(v)}`).join(', ')}}` : String(value);
// A template for each choice of kernels that plans make.
const runFile = i => data.templates[0][data.templates[1][i]]
  .replace(data.here[0], () => flow(JSON.parse(data.sections[0][data.sections[1][i]]))).replace(data.here[1], () => String(field('micro_batch', i)));
const command = i => {
  if (!data.command) return '';
  const fields = Object.keys(data.fields).map(n => [n, String(field(n, i)).replaceAll(' ', ',')])
    .map(([n, value]) => [n, n === 'layers_per_stage' && value === '' ? 'even' : value]).filter(f => f[1] !== '');
  return `${data.command} --fix ${fields.map(f => f.join('=')).join(',')} --write plan.yaml`;
};
const bar = (share, color) => {
  const node = make('span', {className: 'bar'});
  node.style.width = `${Math.max(0, Math.min(1, share)) * 7}rem`;
  node.style.background = color;
  return node;
};
const compared = (a, b) => {
  const rows = [['step', data.step_s, seconds], ['tokens/s/device', every.map(rate), rateText], ['memory, GiB', data.gib, x => fixed(x, 1)]];
  const lines = rows.map(([name, column, text]) => [name, text(column[a]), text(column[b]), signed(column[b] - column[a], text),
    signed(column[b] / column[a] - 1, percent), null]);
  lines.splice(2, 0, ['MFU', percent(mfu(a)), percent(mfu(b)), '', signed(mfu(b) / mfu(a) - 1, percent), null]);
  for (const name of varied.filter(n => field(n, a) !== field(n, b))) lines.push([title(name), wording(field(name, a)), wording(field(name, b)), '', '', null]);
  const times = Object.keys(data.components).map(n => [n, data.components[n]]).filter(([, c]) => Math.max(c[a], c[b]) > 5e-4 * data.step_s[a]);
  const most = Math.max(...times.map(([, c]) => Math.abs(c[b] - c[a])), 1e-12);
  for (const [n, c] of times) lines.push([data.labels[n], seconds(c[a]), seconds(c[b]), signed(c[b] - c[a], seconds), '',
    [Math.abs(c[b] - c[a]) / most, c[b] > c[a] ? '#b5525c' : '#3f78b5']]);
  const memory = Object.entries(data.memory);
  const largest = Math.max(...memory.map(([, c]) => Math.abs(c[b] - c[a])), 1e-12);
  for (const [n, c] of memory) lines.push([`${n}, GiB`, fixed(c[a], 2), fixed(c[b], 2), signed(c[b] - c[a], x => fixed(x, 2)), '',
    [Math.abs(c[b] - c[a]) / largest, c[b] > c[a] ? '#b5525c' : '#3f78b5']]);
  const table = make('table', {className: 'diff'}, make('caption', {textContent: 'Difference: B minus A. Bars: longer or more in red, shorter or less in blue.'}));
  table.append(make('thead', {}, make('tr', {}, ...['', 'A', 'B', 'difference', 'relative'].map(t => make('th', {scope: 'col', textContent: t})))));
  table.append(make('tbody', {}, ...lines.map(line => {
    const cells = line.slice(0, 5).map(text => make('td', {textContent: text}));
    if (line[5]) cells[4].append(bar(...line[5]));
    return make('tr', {}, ...cells);
  })));
  return make('div', {className: 'table', tabIndex: 0, role: 'group', ariaLabel: 'Comparison'}, table);
};
const drawPair = () => {
  const [a, b] = pair, cards = make('div', {className: 'pair'});
  [a, b].forEach((i, side) => {
    if (i === null) return;
    const mark = make('span', {className: side ? 'mark b' : 'mark', textContent: 'AB'[side]});
    const how = field('pipeline', i) === 1 ? '' : data.simulated[i] ? ' Its step time comes from the event graph.' : ' Its step time comes from the closed form.';
    cards.append(make('div', {}, make('h3', {}, mark, ` ${data.plan[i]}`), make('p', {
      textContent: `${seconds(data.step_s[i])} a step, ${rateText(rate(i))} tokens/s/device (${interval(i)}), MFU ${percent(mfu(i))}, ` +
        `${fixed(data.gib[i], 1)} of ${fixed(data.usable_gib[i], 1)} GiB; ${boundBy(i)}.${how}`}), ...copies(i)));
  });
  $('compare').replaceChildren(cards, b === null ? make('p', {className: 'hint', textContent: 'There is no second plan to compare with.'}) : compared(a, b));
};

// --- the figure ---
const canvas = document.querySelector('canvas'), tip = $('tip');
const palette = ['#3f78b5', '#d98a35', '#4c9a6a', '#b5525c', '#8b6bb1', '#6bb0b8', '#b0a03c', '#8a919b'];
const ticks = (low, high, most) => {
  const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
  const found = [];
  for (let x = Math.ceil(low / step - 1e-9); x * step <= high * (1 + 1e-9); x++) found.push(x * step);
  return found;
};
const compact = new Intl.NumberFormat('en', {notation: 'compact', maximumSignificantDigits: 4});
let places = [];
const firstFamily = every.map(i => families(i)[0][0]);
const coloring = () => {
  const name = form.color.value;
  if (!name) return {of: i => data.colors[firstFamily[i]], legend: Object.entries(data.colors).filter(([f]) => firstFamily.includes(f))};
  const words = ordered(name).map(([word, k], at) => [k, wording(word), palette[at % palette.length]]);
  const colors = Object.fromEntries(words.map(([k, , color]) => [k, color]));
  return {of: i => colors[data.fields[name][1][i]], legend: words.map(([, word, color]) => [`${title(name)} ${word}`, color])};
};
const drawScatter = () => {
  const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
  if (!box.width) return;
  canvas.width = Math.round(box.width * ratio);
  canvas.height = Math.round(box.height * ratio);
  const pen = canvas.getContext('2d');
  pen.scale(ratio, ratio);
  const ink = css('--ink'), soft = css('--soft'), line = css('--line'), accent = css('--accent'), paper = css('--paper');
  const colors = coloring();
  $('scatter-legend').replaceChildren(...colors.legend.map(([name, color]) => {
    const dot = make('i');
    dot.style.background = color;
    return make('span', {}, dot, name);
  }));
  pen.font = '12px system-ui, "Segoe UI", sans-serif';
  const inner = {left: 58, right: box.width - 16, top: 22, bottom: box.height - 42};
  const seen = shown.length ? shown : every;
  const span = values => {
    let low = Infinity, high = -Infinity;
    for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
    const room = (high - low) * .05 || Math.abs(high) * .05 || 1;
    return [low - room < 0 && low >= 0 ? 0 : low - room, high + room];
  };
  const [x0, x1] = span(seen.map(i => data.gib[i])), [y0, y1] = span(seen.map(rate));
  const px = gib => inner.left + (gib - x0) / (x1 - x0) * (inner.right - inner.left);
  const py = speed => inner.bottom - (speed - y0) / (y1 - y0) * (inner.bottom - inner.top);
  pen.lineWidth = 1;
  pen.textBaseline = 'middle';
  for (const y of ticks(y0, y1, box.height / 70)) {
    pen.strokeStyle = line;
    pen.beginPath(); pen.moveTo(inner.left, py(y)); pen.lineTo(inner.right, py(y)); pen.stroke();
    pen.fillStyle = soft; pen.textAlign = 'right'; pen.fillText(compact.format(y), inner.left - 6, py(y));
  }
  pen.textBaseline = 'top';
  for (const x of ticks(x0, x1, box.width / 90)) {
    pen.strokeStyle = line;
    pen.beginPath(); pen.moveTo(px(x), inner.top); pen.lineTo(px(x), inner.bottom); pen.stroke();
    pen.fillStyle = soft; pen.textAlign = 'center'; pen.fillText(compact.format(x), px(x), inner.bottom + 5);
  }
  pen.fillStyle = ink;
  pen.textAlign = 'right'; pen.fillText('memory per device, GiB', inner.right, inner.bottom + 22);
  pen.textAlign = 'left'; pen.fillText('tokens/s/device', 4, 2);
  for (const usable of new Set(data.usable_gib)) {
    if (usable <= x0 || usable >= x1) continue;
    pen.strokeStyle = soft; pen.setLineDash([4, 4]);
    pen.beginPath(); pen.moveTo(px(usable), inner.top); pen.lineTo(px(usable), inner.bottom); pen.stroke();
    pen.setLineDash([]); pen.textAlign = 'right'; pen.fillStyle = soft;
    pen.fillText(`${fixed(usable, 0)} GiB may be used`, px(usable) - 4, 2);
  }
  places = shown.map(i => [px(data.gib[i]), py(rate(i)), i]);
  pen.globalAlpha = shown.length > 400 ? .45 : .8;
  for (const [x, y, i] of places) {
    pen.fillStyle = colors.of(i);
    pen.beginPath(); pen.arc(x, y, shown.length > 2000 ? 2.2 : 3.2, 0, 7); pen.fill();
  }
  pen.globalAlpha = 1;
  const front = places.filter(p => data.front[p[2]]).sort((a, b) => a[0] - b[0]);
  pen.strokeStyle = accent; pen.lineWidth = 1.5;
  pen.beginPath(); front.forEach(([x, y], k) => { // no plan lies between two of the front
    if (k) pen.lineTo(x, front[k - 1][1]);
    pen.lineTo(x, y);
  }); pen.stroke();
  for (const [x, y, i] of front) {
    pen.fillStyle = colors.of(i); pen.strokeStyle = ink;
    pen.beginPath(); pen.arc(x, y, 4, 0, 7); pen.fill(); pen.stroke();
  }
  pair.forEach((i, side) => {
    const place = places.find(p => p[2] === i);
    if (i === null || !place) return;
    const [x, y] = place, near = pair[1 - side] !== null && places.find(p => p[2] === pair[1 - side]);
    const shift = near && Math.hypot(near[0] - x, near[1] - y) < 22 ? (x > near[0] || (x === near[0] && side) ? 12 : -12) : 0;
    pen.fillStyle = side ? '#a9461f' : '#2f66a3'; pen.strokeStyle = paper; pen.lineWidth = 2;
    pen.beginPath(); pen.arc(x + shift, y, 10, 0, 7); pen.fill(); pen.stroke();
    pen.fillStyle = '#fff'; pen.textAlign = 'center'; pen.textBaseline = 'middle'; pen.fillText('AB'[side], x + shift, y + .5);
  });
  if (hovered !== null) {
    const place = places.find(p => p[2] === hovered);
    if (place) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.beginPath(); pen.arc(place[0], place[1], 8, 0, 7); pen.stroke(); }
  }
  if (!shown.length) { pen.fillStyle = soft; pen.textAlign = 'center'; pen.fillText('No plan passes these filters.', box.width / 2, box.height / 2); }
  canvas.setAttribute('aria-label', `Speed against memory of ${shown.length.toLocaleString('en')} plans, ${front.length} on the front`);
};
const showTip = (place, speak) => {
  const [x, y, i] = place, list = make('dl');
  const times = parts(i).sort((a, b) => b[1] - a[1]).slice(0, 7);
  for (const [name, s] of times) {
    const mark = make('i');
    mark.style.width = `${100 * s / data.step_s[i]}%`;
    mark.style.background = data.colors[data.families[name]];
    list.append(make('dt', {textContent: data.labels[name]}), make('dd', {}, mark), make('dd', {textContent: seconds(s)}));
  }
  for (const [name, column] of Object.entries(data.memory)) {
    if (column[i] < .005 * data.gib[i]) continue;
    const mark = make('i');
    mark.style.width = `${100 * column[i] / data.usable_gib[i]}%`;
    mark.style.background = data.memory_colors[name] || '#8a919b';
    list.append(make('dt', {textContent: name}), make('dd', {}, mark), make('dd', {textContent: `${fixed(column[i], 1)} GiB`}));
  }
  const line = `${seconds(data.step_s[i])}, ${rateText(rate(i))} tokens/s/device, MFU ${percent(mfu(i))}, ${fixed(data.gib[i], 1)} GiB`;
  tip.replaceChildren(make('b', {textContent: data.plan[i]}), make('span', {textContent: line}), list);
  tip.hidden = false;
  const box = canvas.getBoundingClientRect();
  tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - tip.offsetWidth))}px`;
  tip.style.top = `${y > box.height / 2 ? Math.max(y - tip.offsetHeight - 14, -60) : y + 14}px`;
  if (speak) $('spoken').textContent = `${data.plan[i]}: ${line}; ${boundBy(i)}`;
};
const hover = (place, speak = false) => {
  const i = place ? place[2] : null;
  if (i === hovered) return;
  hovered = i;
  drawScatter();
  if (place) showTip(place, speak); else tip.hidden = true;
};
const nearest = event => {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  let best = null, least = 24 ** 2;
  for (const place of places) {
    const far = (place[0] - x) ** 2 + (place[1] - y) ** 2 - (data.front[place[2]] ? 16 : 0);
    if (far < least) { least = far; best = place; }
  }
  return best;
};
canvas.addEventListener('pointermove', event => hover(nearest(event)));
canvas.addEventListener('pointerleave', () => hover(null));
canvas.addEventListener('blur', () => hover(null));
canvas.addEventListener('click', event => { const place = nearest(event); if (place) select(place[2]); });
canvas.addEventListener('keydown', event => {
  const front = places.filter(p => data.front[p[2]]).sort((a, b) => a[0] - b[0]), walk = front.length ? front : places;
  const at = walk.findIndex(p => p[2] === hovered), key = event.key.toLowerCase();
  if (key === 'arrowright') hover(walk[Math.min(walk.length - 1, at + 1)], true);
  else if (key === 'arrowleft') hover(walk[at < 0 ? walk.length - 1 : Math.max(0, at - 1)], true);
  else if ((key === 'a' || key === 'b') && hovered !== null && !event.ctrlKey && !event.metaKey) select(hovered, key === 'b' ? 1 : 0);
  else if (key === 'escape') hover(null);
  else return;
  event.preventDefault();
});

form.hidden = $('scatter').hidden = false;
$('list').replaceChildren(none, make('div', {className: 'table'}, listing), more, ' ', save);
drawPair();
filter();
new ResizeObserver(drawScatter).observe(canvas);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawScatter);
matchMedia('print').addEventListener('change', drawScatter);
