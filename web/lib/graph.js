// Nodes and their execution ids. Inside a subgraph the host says "4:2": node 2 in wrapper 4.

export function rootGraph(app) {
  return app.rootGraph ?? app.graph;
}

// What tells open workflows apart: the id in the file. A graph from an API file has none but zeros.
export function workflowKey(app, id = rootGraph(app)?.id) {
  const known = id && !/^[0-]*$/.test(id);
  return String(known ? id : (app.extensionManager?.workflow?.activeWorkflow?.path ?? ""));
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
