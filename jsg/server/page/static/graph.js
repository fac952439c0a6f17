// A compiled program as cards in lanes: one lane for each stream, rows in the order in which parts may run.

const TEXT_KINDS = new Set(["open", "append", "media", "turn", "scope", "read_text", "assign"]);
const MAX_TEXT = 90;

/**
 * Places the nodes of a graph, as `to_json()` of a program has it.
 * Texts that follow each other in a stream are one card, because only calls of the model take time.
 * Returns {cards: [{id, kind, title, text, column, row, tag}], edges: [[card, card]], columns, rows}.
 */
export function layout(graph) {
  const place = { cards: [], edges: [], last: new Map(), columns: new Map(), forkOf: new Map() };
  for (const [node, tag] of flattened(graph.nodes, "")) addNode(place, node, tag);
  return {
    cards: place.cards,
    edges: place.edges,
    columns: Math.max(1, place.columns.size),
    rows: 1 + Math.max(0, ...place.cards.map((card) => card.row)),
  };
}

/** Each node with the name of the block that holds it, in program order; bodies follow their `cond` or `loop`. */
function* flattened(nodes, tag) {
  for (const node of nodes) {
    yield [node, tag];
    for (const [name, value] of Object.entries(node)) {
      if (value && Array.isArray(value.nodes)) yield* flattened(value.nodes, name);
    }
  }
}

function addNode(place, node, tag) {
  const before = place.last.get(node.stream) ?? place.forkOf.get(node.stream);
  if (TEXT_KINDS.has(node.kind) && before?.kind === "text" && before.stream === node.stream && before.tag === tag) {
    before.text = cut(before.text + textOf(node));
    return;
  }
  if (TEXT_KINDS.has(node.kind) && !textOf(node).trim()) return; // the end of a turn, or the beginning of the program
  const sources = before ? [before] : [];
  if (node.kind === "join") {
    for (const branch of node.branches) {
      const end = place.last.get(branch);
      if (end) sources.push(end);
    }
  }
  if (!place.columns.has(node.stream)) place.columns.set(node.stream, place.columns.size);
  const card = {
    id: node.id,
    kind: TEXT_KINDS.has(node.kind) ? "text" : node.kind,
    stream: node.stream,
    tag,
    title: titleOf(node),
    text: textOf(node),
    column: place.columns.get(node.stream),
    row: sources.length ? 1 + Math.max(...sources.map((source) => source.row)) : 0,
  };
  place.cards.push(card);
  for (const source of sources) place.edges.push([source, card]);
  place.last.set(node.stream, card);
  if (node.kind === "fork") for (const branch of node.branches) place.forkOf.set(branch, card);
}

function titleOf(node) {
  switch (node.kind) {
    case "generate":
      return `${node.name ?? "text"} = gen`;
    case "choose":
      return `${node.name ?? "text"} = select`;
    case "fork":
      return `fork into ${node.branches.length}`;
    case "join":
      return `join (${node.mode ?? "gather_variable"})`;
    case "cond":
    case "loop":
      return node.kind;
    default:
      return "text";
  }
}

function textOf(node) {
  switch (node.kind) {
    case "open":
      return node.stream ? `${node.program}: ` : "";
    case "append":
      return cut(node.pieces.map(pieceText).join(""));
    case "media":
      return "[picture or video] ";
    case "turn":
      return node.is_begin === false ? " " : `${node.role}: `;
    case "generate":
      return Object.entries(node.args ?? {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(" ");
    case "choose":
      return cut(node.choices.map((choice) => choice.map(pieceText).join("")).join(" | "));
    case "assign":
      return `${node.name} = … `;
    default:
      return "";
  }
}

function pieceText(piece) {
  if (typeof piece === "string") return piece;
  return "argument" in piece ? `{${piece.argument}}` : `{${piece.name || "text"}}`;
}

function cut(text) {
  return text.length > MAX_TEXT ? `${text.slice(0, MAX_TEXT)}…` : text;
}
