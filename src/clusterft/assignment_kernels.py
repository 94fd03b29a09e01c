"""Compiled inner loops of the exact capacity-constrained assignment.

In go cost rows, prices and size limits as arrays; out come labels, margins and balanced prices, written in place. Row i with
price vector p belongs to the cluster k with the smallest cost[i, k] + p[k]; the prices of the k clusters and of the sink (node k,
through which sizes may vary between their limits) are the dual variables of the assignment.
"""

from __future__ import annotations

import numpy as np

from clusterft.jit import compiled


@compiled
def best_two(products, offsets, start, rows, labels, seconds, gaps, error_scale, errors):
    """Labels, runners-up and certain margins of one block of rows.

    products (b, k) float32 or float64, cost = products + offsets; offsets (k,) float64 hold the prices, too
    rows     (b,) int64 where the results go, or empty: they go to start, start + 1, ...
    gaps     margin less twice the possible rounding error error_scale * errors[row], rounded down
    """
    n, k = products.shape
    for i in range(n):
        best, second, at, after = np.inf, np.inf, 0, 0
        for c in range(k):
            value = products[i, c] + offsets[c]
            if value < best:
                second, after = best, at
                best, at = value, c
            elif value < second:
                second, after = value, c
        row = rows[i] if rows.size else start + i
        labels[row] = at
        seconds[row] = after
        gaps[row] = (second - best - 2.0 * error_scale * errors[row]) * (1.0 - 1e-6) if k > 1 else np.inf


@compiled(fast=True)
def squared_distances(points, centers, out):
    """out[i, c] = sum_d (points[i, d] - centers[c, d])^2 in float64; each value depends on its row and centre alone."""
    for i in range(points.shape[0]):
        for c in range(centers.shape[0]):
            total = 0.0
            for d in range(points.shape[1]):
                gap = np.float64(points[i, d]) - centers[c, d]
                total += gap * gap
            out[i, c] = total


@compiled(fast=True)
def own_squared_distances(points, centers, labels, out):
    """out[i] = squared distance of row i to the centre of its own cluster, float64."""
    for i in range(points.shape[0]):
        total = 0.0
        for d in range(points.shape[1]):
            gap = np.float64(points[i, d]) - centers[labels[i], d]
            total += gap * gap
        out[i] = total


@compiled
def relabel(costs, prices, labels, counts):
    """Gives every row its cheapest cluster under the prices (ties: the lower number), counts anew; returns how many changed."""
    changed = 0
    for i in range(costs.shape[0]):
        best, at = np.inf, 0
        for c in range(costs.shape[1]):
            value = costs[i, c] + prices[c]
            if value < best:
                best, at = value, c
        if at != labels[i]:
            counts[labels[i]] -= 1
            counts[at] += 1
            labels[i] = at
            changed += 1
    return changed


@compiled
def carry_margins(gaps, labels, norms, changes, steps):
    """Lowers every margin by the most that moved centres can have taken from it: changes[label, step], where `steps` steps a unit
    of length lead up to the row's norm. One look-up a row, whatever the number of clusters."""
    for i in range(gaps.size):
        change = changes[labels[i], int(norms[i] * steps) + 1]
        gaps[i] = gaps[i] + change - 2e-7 * (abs(gaps[i]) + abs(change))


@compiled
def lower_margins(gaps, labels, fall):
    """gaps[i] - fall[labels[i]], rounded down to float32, in place."""
    for i in range(gaps.size):
        gaps[i] = np.nextafter(np.float32(gaps[i] - fall[labels[i]]), np.float32(-np.inf))


@compiled
def margins(costs, prices, labels, seconds, gaps):
    """Runner-up and margin of every row under the prices; labels must be the cheapest clusters."""
    for i in range(costs.shape[0]):
        a = labels[i]
        own, best, at = costs[i, a] + prices[a], np.inf, a
        for c in range(costs.shape[1]):
            if c != a and costs[i, c] + prices[c] < best:
                best, at = costs[i, c] + prices[c], c
        seconds[i] = at
        gaps[i] = best - own


@compiled
def _search_edge(costs, head, after, a, b, weight, via, ties):
    """The cheapest way to move one row from cluster a to b: weight, a row that attains it, and how many do."""
    least, row, count = np.inf, -1, 0
    i = head[a]
    while i >= 0:
        value = costs[i, b] - costs[i, a]
        if value < least:
            least, row, count = value, i, 1
        elif value == least and row >= 0:
            count += 1
        i = after[i]
    weight[a, b], via[a, b], ties[a, b] = least, row, count


@compiled
def _insert(costs, head, after, before, a, i, weight, via, ties):
    after[i], before[i] = head[a], -1
    if head[a] >= 0:
        before[head[a]] = i
    head[a] = i
    for c in range(costs.shape[1]):
        if c == a:
            continue
        value = costs[i, c] - costs[i, a]
        if value < weight[a, c]:
            weight[a, c], via[a, c], ties[a, c] = value, i, 1
        elif value == weight[a, c] and via[a, c] >= 0:
            ties[a, c] += 1


@compiled
def _remove(costs, head, after, before, a, i, weight, via, ties, stale):
    if before[i] >= 0:
        after[before[i]] = after[i]
    else:
        head[a] = after[i]
    if after[i] >= 0:
        before[after[i]] = before[i]
    for c in range(costs.shape[1]):
        if c != a and via[a, c] >= 0 and costs[i, c] - costs[i, a] == weight[a, c]:
            ties[a, c] -= 1
            if ties[a, c] <= 0 or via[a, c] == i:
                stale[c] = True


@compiled
def _shortest_path(weight, prices, flow, low, high, excess, distance, parent, done):
    """Dijkstra from all nodes with excess to the nearest with a deficit, in reduced costs. Returns that node, -1 if none."""
    k = low.size
    for v in range(k + 1):
        distance[v] = 0.0 if excess[v] > 0 else np.inf
        parent[v] = -1
        done[v] = False
    while True:
        u, least = -1, np.inf
        for v in range(k + 1):
            if not done[v] and distance[v] < least:
                u, least = v, distance[v]
        if u < 0:
            return -1
        if excess[u] < 0:
            return u
        done[u] = True
        for v in range(k + 1):
            if done[v]:
                continue
            if u < k and v < k:
                cost = weight[u, v]
            elif u < k:
                cost = 0.0 if flow[u] < high[u] else np.inf
            else:
                cost = 0.0 if flow[v] > low[v] else np.inf
            if cost < np.inf:
                reach = least + max(0.0, cost + prices[v] - prices[u])
                if reach < distance[v]:
                    distance[v] = reach
                    parent[v] = u


@compiled
def _bottleneck(target, parent, ties, flow, low, high, excess):
    k = low.size
    amount = -excess[target]
    v = target
    while parent[v] >= 0:
        u = parent[v]
        if u < k and v < k:
            amount = min(amount, ties[u, v])
        elif u < k:
            amount = min(amount, high[u] - flow[u])
        else:
            amount = min(amount, flow[v] - low[v])
        v = u
    return min(amount, excess[v])


@compiled
def _take_out(costs, labels, head, after, before, a, b, amount, weight, via, ties, moved, stale):
    """Takes `amount` rows that attain the weight of edge a -> b out of cluster a; they are listed in `moved`."""
    least = weight[a, b]
    i, found = via[a, b], 0
    if amount == 1:
        moved[0], found = i, 1
    else:
        i = head[a]
        while i >= 0 and found < amount:
            if costs[i, b] - costs[i, a] == least:
                moved[found] = i
                found += 1
            i = after[i]
    stale[:] = False
    for j in range(found):
        _remove(costs, head, after, before, a, moved[j], weight, via, ties, stale)
        labels[moved[j]] = b
    for c in range(costs.shape[1]):
        if stale[c]:
            _search_edge(costs, head, after, a, c, weight, via, ties)


@compiled
def balance(costs, labels, counts, prices, flow, low, high):
    """Successive shortest paths on the k + 1 nodes until every size equals its flow. All arrays change in place.

    costs (m, k) float64 of the rows that may move (inf: not allowed); labels (m,) must be cheapest under prices (k + 1,)
    counts (k,) sizes including rows that may not move; flow (k,) sizes asked for, at `high` where the price is positive, at
    `low` where it is negative. Many equal rows move at once. Returns the number of paths, or -1 if no solution exists.
    """
    m, k = costs.shape
    head, after, before = np.full(k, -1, np.int64), np.full(m, -1, np.int64), np.full(m, -1, np.int64)
    weight, via, ties = np.full((k, k), np.inf), np.full((k, k), -1, np.int64), np.zeros((k, k), np.int64)
    excess, distance = np.zeros(k + 1, np.int64), np.empty(k + 1)
    parent, done, stale = np.empty(k + 1, np.int64), np.empty(k + 1, np.bool_), np.empty(k, np.bool_)
    for i in range(m - 1, -1, -1):
        _insert(costs, head, after, before, labels[i], i, weight, via, ties)
    excess[:k] = counts - flow
    excess[k] = flow.sum() - counts.sum()
    moved, ends = np.empty((k, max(m, 1)) if m * k < 4_000_000 else (k, 4_000_000 // k), np.int64), np.empty(k + 1, np.int64)
    paths = 0
    while (excess > 0).any():
        target = _shortest_path(weight, prices, flow, low, high, excess, distance, parent, done)
        if target < 0:
            return -1
        for v in range(k + 1):
            if done[v]:
                prices[v] += distance[target] - distance[v]
        amount = min(_bottleneck(target, parent, ties, flow, low, high, excess), moved.shape[1])
        v, steps = target, 0
        while parent[v] >= 0:
            u = parent[v]
            if u < k and v < k:
                _take_out(costs, labels, head, after, before, u, v, amount, weight, via, ties, moved[steps], stale)
                ends[steps] = v
                steps += 1
                counts[u] -= amount
                counts[v] += amount
            elif u < k:
                flow[u] += amount
            else:
                flow[v] -= amount
            v = u
        excess[v] -= amount
        excess[target] += amount
        for s in range(steps):
            for j in range(amount):
                _insert(costs, head, after, before, ends[s], moved[s, j], weight, via, ties)
        paths += 1
    prices -= prices[k]
    return paths
