"""BlockTables: what each request holds of the cache. All sharing, allocating, publishing and freeing is done here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cache.block import Block, BlockId
from cache.hashing import TOKEN_BYTES
from cache.identity import BlockHash
from cache.match import BlockStatus, Match
from cache.node import PrefixNode
from cache.pool import BlockPool
from cache.reason import MissReason
from cache.retention import Retention
from cache.tree import PrefixTree
from scheduler.batch import Copy
from scheduler.config import Recovery, SchedulerConfig
from scheduler.ledger import Source
from scheduler.report import report
from scheduler.request import Request

_SOURCES = {BlockStatus.REUSED: Source.REUSED, BlockStatus.PENDING: Source.PENDING}


class BlockTables:
    """Fills and empties the requests' tables, chains and open lists.

    `to_zero` collects (block, first slot) that may hold values that are not finite and that nobody uses any more.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree, config: SchedulerConfig) -> None:
        self.to_zero: list[tuple[BlockId, int]] = []
        self._pool = pool
        self._tree = tree
        self._block_size = tree.block_size
        self._suspects: set[BlockId] = set()
        self._retention = Retention(pool, tree, int(config.pin_share * len(pool.blocks)))
        self._repair = config.recovery is Recovery.REPAIR
        self._partial_reuse = config.partial_reuse

    # -- admission ----------------------------------------------------------------------------------------------------

    def match(self, request: Request) -> Match:
        """Look the request's tokens up. Changes nothing but the request's own list of hashes."""
        tokens = bytes(request.encoded)
        self._tree.extend_hashes(request.hashes, request.identity, tokens)
        if request.detached:
            return Match.nothing(len(request.tokens), self._block_size, MissReason.INVALIDATED)
        if not request.cache.read:
            return Match.nothing(len(request.tokens), self._block_size, MissReason.OPTED_OUT)
        return self.look_up(request.identity, tokens, request.hashes)

    def look_up(self, identity: BlockHash, tokens: bytes, hashes: list[BlockHash]) -> Match:
        """The match of encoded `tokens` under the policies in force."""
        return self._tree.match(
            identity, tokens, hashes, keep_after_gap=self._repair, copy_siblings=self._partial_reuse
        )

    def explain(self, match: Match, tokens: bytes, others: Iterable[tuple[BlockHash, MissReason]]) -> None:
        """Where nothing like the prompt was ever seen under its own identity, see whether another one has it."""
        if match.blocks[0].reason is not MissReason.NEVER_SEEN:
            return
        for root, reason in others:
            hashes: list[BlockHash] = []
            self._tree.extend_hashes(hashes, root, tokens)
            elsewhere = self._tree.chain(root, tokens, hashes)
            for found, node in zip(match.blocks, elsewhere, strict=False):
                if node.block is not None and found.reason is MissReason.NEVER_SEEN:
                    found.reason = reason
            if elsewhere:
                return

    def admit(self, request: Request, now: float, *, break_pins: bool) -> list[Copy] | None:
        """Give a waiting request a block for every block of its tokens; None, and nothing changed, if they do not
        suffice. The copies must run before anything is computed; each holds a reference to its source."""
        match = self.match(request)
        self._find_with_first_choice(request, match)
        shared = [block for found in match.blocks if (block := found.block) is not None]
        room = self._pool.available + (self._pool.breakable if break_pins else 0)
        revived = sum(block.ref_count == 0 and (break_pins or not block.pinned) for block in shared)
        spare = room - revived - (len(match.blocks) - len(shared))
        if spare < 0:
            return None
        for block in shared:
            self._pool.share(block)
        self._hold_copy_sources(match, spare)
        self._link(request, match)
        request.first_written = None
        copies = []
        for found in match.blocks:
            block = found.block or self._allocate(request, found.index, break_pins)
            request.table.append(block)
            if found.status is not BlockStatus.REUSED:
                request.open.append(found.index)
            if found.copy_from is not None:
                copies.append(Copy(found.copy_from, block, found.copy_slots))
            if found.status is BlockStatus.REUSED:
                self._note_use(request, block, now)
            elif found.copy_from is not None:
                self._note_copy(request, found.copy_from, now)
        self._note_sources(request, match)
        if request.wants_report and request.usage is None:
            self.explain(match, bytes(request.encoded), request.others)
            request.report = report(match, request.hashes, reveal=request.reveals)
        return copies

    def _find_with_first_choice(self, request: Request, match: Match) -> None:
        """The unfilled end of a prompt is in no tree while the prompt's first choice goes on writing behind it; what is
        written there will not change, so it can be copied."""
        first, index = request.first, request.prompt_len // self._block_size
        if first is None or index >= min(len(first.table), len(match.blocks)) or not self._partial_reuse:
            return
        if first.detached or request.detached or not (first.cache.write and request.cache.read):
            return
        if not self._repair and any(found.status is BlockStatus.MISSING for found in match.blocks[:index]):
            return
        block, found = first.table[index], match.blocks[index]
        if block is None or block.published or found.status is not BlockStatus.MISSING:
            return
        start = index * self._block_size
        slots = min(block.written, request.prompt_len - start, len(request.tokens) - 1 - start)
        if slots > found.copy_slots:
            found.copy_from, found.copy_slots = block, slots

    def _note_use(self, request: Request, block: Block | None, now: float) -> None:
        if block is not None and block.published:
            assert block.node is not None
            self._retention.used(block.node, request.cache.ttl, pin_for=self._pin_for(request, block.node), now=now)

    def _note_copy(self, request: Request, source: Block, now: float) -> None:
        """A use, but nothing to pin: what the request wants kept are its own blocks."""
        if source.published and source.node is not None:
            self._retention.used(source.node, request.cache.ttl, now=now)

    def _pin_for(self, request: Request, node: PrefixNode) -> float:
        return request.cache.pinned_for(node.index * self._block_size)

    def _hold_copy_sources(self, match: Match, spare: int) -> None:
        """Reference the siblings to copy from, so far as that leaves enough blocks for what must be allocated."""
        for found in match.blocks:
            if found.copy_from is None:
                continue
            if found.copy_from.ref_count == 0:
                if spare == 0:
                    found.copy_from, found.copy_slots = None, 0
                    continue
                spare -= 1
            self._pool.share(found.copy_from)

    def _link(self, request: Request, match: Match) -> None:
        """Build the request's chain: a node for each full block of its tokens, found or made."""
        request.chain_ended = request.detached
        if request.detached:
            return
        end = root = self._tree.root(request.identity)
        self._tree.hold(root)
        for index in range(len(request.tokens) // self._block_size):
            node = match.blocks[index].node or self._tree.extend(
                end, request.hashes[index], self._tokens(request, index)
            )
            if node is None:
                request.chain_ended = True
                break
            request.chain.append(node)
            end = node
        self._tree.hold(end)
        self._tree.release(root)
        request.held = end

    def _note_sources(self, request: Request, match: Match) -> None:
        if request.usage is not None:
            return
        for found in match.blocks:
            start = found.index * self._block_size
            if found.status in _SOURCES:
                request.ledger.found(start, start + self._block_size, _SOURCES[found.status])
            elif found.copy_slots:
                request.ledger.found(start, start + found.copy_slots, Source.COPIED)

    # -- while it runs ------------------------------------------------------------------------------------------------

    def missing(self, request: Request) -> list[int]:
        """Indices of blocks the request needs before it can go on: gaps, and the one its newest token opens."""
        gaps = [index for index in request.open if index < len(request.table) and request.table[index] is None]
        if (len(request.tokens) - 1) // self._block_size == len(request.table):
            gaps.append(len(request.table))
        return gaps

    def fill(self, request: Request, index: int, *, break_pins: bool) -> list[Copy] | None:
        """Give the request a block at `index`: shared if the cache has it or another request is computing it, else a
        new one, with the copy that spares its first positions where a sibling has them. None if no block is left."""
        node = self._shareable(request, index)
        block = None if node is None or not request.cache.read else node.block or node.pending
        copies = []
        if block is not None:
            self._pool.share(block)
        elif self._pool.available or (break_pins and self._pool.breakable):
            source, slots = self._hold_sibling(request, index)
            block = self._allocate(request, index, break_pins)
            if source is not None:
                copies.append(Copy(source, block, slots))
        else:
            return None
        if index == len(request.table):
            request.table.append(block)
        else:
            request.table[index] = block
        request.reopen(index)
        return copies

    def _hold_sibling(self, request: Request, index: int) -> tuple[Block | None, int]:
        """A reference to the resident block that shares the most leading tokens with block `index` of the request, if
        that leaves one to allocate. The last position is never copied."""
        unproven = index > len(request.chain) or request.held is None
        if unproven or request.detached or not (self._partial_reuse and request.cache.read):
            return None, 0
        parent = request.chain[index - 1] if index else self._tree.root(request.identity)
        end = min((index + 1) * self._block_size, len(request.tokens) - 1)
        closest = parent.closest_resident(_encoded(request, index * self._block_size, end))
        source = None if closest is None else closest[0].block
        if closest is None or source is None or (source.ref_count == 0 and self._pool.available < 2):
            return None, 0
        self._pool.share(source)
        return source, closest[1]

    def publish_full(self, request: Request, now: float) -> None:
        """Publish every open block that has filled, or switch to the one that was published meanwhile."""
        still_open = []
        for index in request.open:
            block = request.table[index]
            if block is None or block.written < self._block_size:
                still_open.append(index)
            else:
                self._publish(request, index, block, now)
        request.open = still_open

    def _publish(self, request: Request, index: int, block: Block, now: float) -> None:
        if not request.cache.write:
            return
        while len(request.chain) <= index and not request.chain_ended:
            self._extend_chain(request)
        if index >= len(request.chain):
            return
        node = request.chain[index]
        was_there = node.block is not None
        kept = self._tree.publish(node, block)
        if was_there:
            self._note_use(request, kept, now)
        else:
            self._retention.published(node, request.cache.ttl, pin_for=self._pin_for(request, node), now=now)
        if kept is not block:
            self._pool.share(kept)
            request.table[index] = kept
            self._let_go(block)

    def _extend_chain(self, request: Request) -> None:
        assert request.held is not None
        index = len(request.chain)
        self._tree.extend_hashes(request.hashes, request.identity, bytes(request.encoded))
        node = self._tree.extend(request.held, request.hashes[index], self._tokens(request, index))
        if node is None:
            request.chain_ended = True
            return
        request.chain.append(node)
        self._tree.hold(node)
        self._tree.release(request.held)
        request.held = node

    def _shareable(self, request: Request, index: int) -> PrefixNode | None:
        """The node whose K/V block `index` will hold, if others may have them while they are being written.

        Not for the last block: were another request to write it whole, the last position would have K/V and no logits.
        """
        last = (len(request.tokens) - 1) // self._block_size
        return request.chain[index] if index < min(last, len(request.chain)) else None

    def _allocate(self, request: Request, index: int, break_pins: bool) -> Block:
        block = self._pool.allocate(break_pins=break_pins)
        node = self._shareable(request, index)
        # One that does not read computes all positions itself, so nobody else may write its blocks.
        shares = request.cache.read and request.cache.write
        if node is not None and shares and node.block is None and node.pending is None:
            self._tree.await_block(node, block)
        return block

    # -- letting go ---------------------------------------------------------------------------------------------------

    def release(self, request: Request, now: float, *, keep_tails: bool) -> None:
        """Free all the request's blocks, the last first, so that of one prompt the end is evicted before the
        beginning. With `keep_tails` what was written of unfilled blocks stays to be copied from."""
        keep_tails = keep_tails and self._partial_reuse and request.cache.write and not request.detached
        for index in range(len(request.table) - 1, -1, -1):
            block = request.table[index]
            if block is None:
                continue
            parent = self._tail_parent(request, index, block) if keep_tails else None
            if parent is not None:
                self._keep_tail(request, index, block, parent, now)
            elif block.published and block.node is not None:
                block.node.last_use = now
            self._let_go(block)
        request.table.clear()
        request.open.clear()
        request.chain.clear()
        if request.held is not None:
            self._tree.release(request.held)
            request.held = None

    def _tail_parent(self, request: Request, index: int, block: Block) -> PrefixNode | None:
        """The node under which `block` may stay as a tail; None if it may not."""
        if block.published or block.ref_count > 1 or not 0 < block.written < self._block_size:
            return None
        if index == 0:
            return self._tree.root(request.identity)
        return request.chain[index - 1] if index <= len(request.chain) else None

    def _keep_tail(self, request: Request, index: int, block: Block, parent: PrefixNode, now: float) -> None:
        if block.node is not None:
            self._tree.abandon(block)
        start = index * self._block_size
        if self._tree.publish_tail(parent, _encoded(request, start, start + block.written), block):
            assert block.node is not None
            self._retention.published(block.node, request.cache.ttl, now=now)

    def _let_go(self, block: Block) -> None:
        if block.ref_count == 1 and block.node is not None and not block.published:
            self._tree.abandon(block)
        self._pool.free(block)
        if block.ref_count == 0 and block.block_id in self._suspects:
            self._suspects.remove(block.block_id)
            self.to_zero.append((block.block_id, 0))

    def suspect(self, blocks: Iterable[Block]) -> None:
        """These unpublished blocks may hold values that are not finite: zero each when its last holder lets go."""
        self._suspects.update(block.block_id for block in blocks)

    def expire(self, now: float) -> None:
        """Drop what has outlived its time to live."""
        self._retention.expire(now)

    def free_sources(self, copies: Iterable[Copy]) -> None:
        """These copies have run, or never will."""
        for copy in copies:
            self._pool.free(copy.source)

    # -- what acts on a running cache ---------------------------------------------------------------------------------

    def drop(self, node: PrefixNode, running: Iterable[Request], reason: MissReason = MissReason.DROPPED) -> None:
        """The bytes of `node` are gone: it becomes a gap in every table that held its block."""
        block = self._tree.drop(node, reason)
        if block is None:
            return
        for request in running:
            if node.index < len(request.table) and request.table[node.index] is block:
                request.table[node.index] = None
                request.reopen(node.index)
                self._pool.free(block)

    def invalidate(self, node: PrefixNode, running: Iterable[Request]) -> None:
        """`node` and all below it are no longer true, nor is anything that was copied from them: all of it is
        forgotten, and requests that hold any of it are detached. `node` itself may be in the tree no longer."""
        todo, seen = [node], {node}
        while todo:
            untrue = todo.pop()
            self._tree.invalidate(untrue)
            for copy in self._tree.copies(untrue):
                if copy not in seen:
                    seen.add(copy)
                    todo.append(copy)
            for block in _open_blocks(running):
                if not block.published and block.lineage.step_from(untrue) is not None:
                    self._detach_holders(block, running)
        for request in running:
            if request.held is not None and request.held.forgotten:
                self._detach(request, len(request.chain))

    def sources(self, wanted: Callable[[PrefixNode], bool], running: Iterable[Request]) -> list[PrefixNode]:
        """The wanted ones of the nodes that something was copied from; they may be in the tree no longer."""
        lineages = (*self._tree.lineages(), *(block.lineage for block in _open_blocks(running)))
        return list({node for lineage in lineages for node in lineage.matching(wanted)})

    def _detach_holders(self, block: Block, running: Iterable[Request]) -> None:
        """Some slots of an unpublished block are no longer true: whoever holds it is detached from there on."""
        if block.node is not None:
            self._tree.abandon(block)
        for request in running:
            if block in request.table:
                self._detach(request, request.table.index(block))

    def _detach(self, request: Request, length: int) -> None:
        """The request's chain ends after `length` nodes at most, and before the first forgotten one."""
        request.detached = request.chain_ended = True
        if request.held is None:
            return
        before = request.held
        del request.chain[length:]
        while request.chain and request.chain[-1].forgotten:
            request.chain.pop()
        request.held = request.chain[-1] if request.chain else None
        if request.held is not None:
            self._tree.hold(request.held)
        self._tree.release(before)

    def _tokens(self, request: Request, index: int) -> bytes:
        """The encoded tokens of a full block."""
        return _encoded(request, index * self._block_size, (index + 1) * self._block_size)


def _open_blocks(running: Iterable[Request]) -> list[Block]:
    """The blocks of requests that may not be full yet, each as often as it is held."""
    return [block for request in running for index in request.open if (block := request.table[index]) is not None]


def _encoded(request: Request, start: int, end: int) -> bytes:
    """The encoded tokens at positions [start, end)."""
    return bytes(request.encoded[start * TOKEN_BYTES : end * TOKEN_BYTES])
