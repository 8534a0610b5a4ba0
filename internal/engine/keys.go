package engine

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// keyer names chunks. A chunk's hash covers its tokens and all tokens before
// it: a chain of SHA-256, in which link i is the hash of link i-1 (32 zero
// bytes for i = 0) and the chunk's tokens as little-endian u32. A key is
//
//	model@world_size@worker_id@hash@dtype
//
// with the hash in lower-case hex, so two prompts share exactly the keys of
// their common whole chunks.
type keyer struct {
	model string
	ranks int
	dtype string
	chunk int // tokens of a full chunk
}

// hashes returns the hash of each chunk of a prompt, the last one partial.
func (k keyer) hashes(tokens []int) []string {
	var link [sha256.Size]byte
	out := make([]string, 0, chunks(len(tokens), k.chunk))
	buf := make([]byte, 0, sha256.Size+4*k.chunk)
	for len(tokens) > 0 {
		n := min(k.chunk, len(tokens))
		buf = append(buf[:0], link[:]...)
		for _, t := range tokens[:n] {
			buf = binary.LittleEndian.AppendUint32(buf, uint32(t))
		}
		link = sha256.Sum256(buf)
		out = append(out, hex.EncodeToString(link[:]))
		tokens = tokens[n:]
	}
	return out
}

// key returns the key of the chunk with that hash at a rank.
func (k keyer) key(rank int, hash string) string {
	return fmt.Sprintf("%s@%d@%d@%s@%s", k.model, k.ranks, rank, hash, k.dtype)
}

// keys returns the keys of all chunks of a prompt at a rank.
func (k keyer) keys(rank int, tokens []int) []string {
	out := k.hashes(tokens)
	for i, h := range out {
		out[i] = k.key(rank, h)
	}
	return out
}

// chunks returns how many chunks of `chunk` tokens hold `tokens` tokens.
func chunks(tokens, chunk int) int { return (tokens + chunk - 1) / chunk }
