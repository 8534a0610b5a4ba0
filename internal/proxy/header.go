package proxy

import (
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"strings"
)

// hopByHop are the headers that concern one connection, not the request.
var hopByHop = []string{"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade"}

// ofBody are the headers about a body: ours is another one.
var ofBody = []string{"Content-Length", "Content-Type", "Content-Encoding", "Accept", "Accept-Encoding", "Expect"}

const requestIDHeader = "X-Request-Id"

// maxRequestID is how long a client's X-Request-Id may be, in bytes; a longer one
// is replaced.
const maxRequestID = 256

// requestID returns the client's X-Request-Id, or one made for it.
func requestID(h http.Header) string {
	id := h.Get(requestIDHeader)
	if id != "" && len(id) <= maxRequestID {
		return id
	}
	var b [16]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// forEngine returns the headers of a client's request for the engines.
func forEngine(client http.Header, id string) http.Header {
	h := http.Header{}
	copyEndToEnd(h, client)
	for _, name := range ofBody {
		h.Del(name)
	}
	h.Set(requestIDHeader, id)
	return h
}

// copyEndToEnd copies what is not about one connection, nor about this server's
// own answer.
func copyEndToEnd(dst, src http.Header) {
	drop := map[string]bool{requestIDHeader: true, "Content-Length": true, "Date": true, "Server": true}
	for _, name := range hopByHop {
		drop[name] = true
	}
	for _, list := range src.Values("Connection") {
		for name := range strings.SplitSeq(list, ",") {
			drop[http.CanonicalHeaderKey(strings.TrimSpace(name))] = true
		}
	}
	for name, values := range src {
		if !drop[name] {
			dst[name] = append([]string(nil), values...)
		}
	}
}
