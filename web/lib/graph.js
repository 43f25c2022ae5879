// Nodes and their execution ids. Inside a subgraph the host says "4:2": node 2 in wrapper 4.

export function rootGraph(app) {
  return app.rootGraph ?? app.graph;
}

// A graph from an API file has an id of zeros, if any.
export function isRealId(id) {
  return Boolean(id) && !/^[0-]*$/.test(String(id));
}

// Every execution id that leads to `node`; a subgraph used twice gives its nodes two.
// Ids are numbers in some frontends and strings in others.
export function executionIds(node, graph, prefix = "") {
  const found = [];
  for (const other of graph?.nodes ?? []) {
    if (other === node) found.push(prefix + other.id);
    if (other.subgraph) found.push(...executionIds(node, other.subgraph, `${prefix}${other.id}:`));
  }
  return found;
}

// Every node of some classes in a graph and its subgraphs, each object once.
export function nodesOf(classes, graph, found = new Set(), seen = new Set()) {
  if (!graph || seen.has(graph)) return found;
  seen.add(graph);
  for (const node of graph.nodes ?? []) {
    if (classes.has(node.comfyClass)) found.add(node);
    nodesOf(classes, node.subgraph, found, seen);
  }
  return found;
}

const MUTED = 2; // the host's modes of a node
const BYPASSED = 4;

// "muted", "bypassed" or "": what keeps a node out of the next run.
export function asideOf(node) {
  return { [MUTED]: "muted", [BYPASSED]: "bypassed" }[node.mode] ?? "";
}
