package zmtp

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
)

func TestFrames(t *testing.T) {
	long := strings.Repeat("x", 256)
	for _, tc := range []struct {
		name   string
		frames [][]byte
		hex    string
	}{
		{"one empty", frames(""), "0000"},
		{"envelope", frames("", "ab"), "0100" + "00026162"},
		{"longest short", frames(long[:255]), "00ff" + strings.Repeat("78", 255)},
		{"shortest long", frames(long), "020000000000000100" + strings.Repeat("78", 256)},
		{"long with more", frames(long, "z"), "030000000000000100" + strings.Repeat("78", 256) + "00017a"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := appendMessage(nil, tc.frames)
			if hex.EncodeToString(got) != tc.hex {
				t.Fatalf("got %x", got)
			}
			if encodedSize(tc.frames) != len(got) {
				t.Fatalf("encodedSize = %d, encoded are %d", encodedSize(tc.frames), len(got))
			}
			back, _, err := newReader(bytes.NewReader(got), testLimits).next()
			if err != nil || text(back) != text(tc.frames) {
				t.Fatalf("read %q, %v", back, err)
			}
		})
	}
}

func TestHeader(t *testing.T) {
	for _, tc := range []struct {
		name, hex string
		want      header
		ok, bad   bool
	}{
		{name: "nothing", hex: ""},
		{name: "half a short one", hex: "00"},
		{name: "short", hex: "0105", want: header{flags: 1, size: 5, len: 2}, ok: true},
		{name: "half a long one", hex: "0200000000000001"},
		{name: "long", hex: "020000000000000100", want: header{flags: 2, size: 256, len: 9}, ok: true},
		{name: "long form of a small size", hex: "020000000000000001", want: header{flags: 2, size: 1, len: 9}, ok: true},
		{name: "1 TiB is a header like any other", hex: "020000010000000000", want: header{flags: 2, size: 1 << 40, len: 9}, ok: true},
		{name: "63 bits", hex: "027fffffffffffffff", want: header{flags: 2, size: 1<<63 - 1, len: 9}, ok: true},
		{name: "64 bits", hex: "028000000000000000", bad: true},
		{name: "reserved flag", hex: "0800", bad: true},
		{name: "command", hex: "0405", want: header{flags: 4, size: 5, len: 2}, ok: true},
		{name: "command with more", hex: "0505", bad: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, err := hex.DecodeString(tc.hex)
			if err != nil {
				t.Fatal(err)
			}
			h, ok, err := parseHeader(b)
			if ok != tc.ok || (err != nil) != tc.bad || ok && h != tc.want {
				t.Fatalf("got %+v, %v, %v", h, ok, err)
			}
		})
	}
}

func TestCommands(t *testing.T) {
	ping := appendPing(nil, 20, []byte("ctx"))
	if want := "040a0450494e470014637478"; hex.EncodeToString(ping) != want {
		t.Fatalf("PING is %x, want %s", ping, want)
	}
	name, data, err := parseCommand(ping[2:])
	if err != nil || name != "PING" {
		t.Fatal(name, err)
	}
	ttl, ctx, err := parsePing(data)
	if err != nil || ttl != 20 || string(ctx) != "ctx" {
		t.Fatal(ttl, ctx, err)
	}
	for _, n := range []int{2, 2 + maxPingContext} {
		if _, _, err := parsePing(make([]byte, n)); err != nil {
			t.Errorf("PING data of %d bytes: %v", n, err)
		}
	}
	for _, n := range []int{0, 1, 2 + maxPingContext + 1} {
		if _, _, err := parsePing(make([]byte, n)); err == nil {
			t.Errorf("PING data of %d bytes was taken", n)
		}
	}
	for _, bad := range []string{"", "\x00", "\x05PING"} {
		if _, _, err := parseCommand([]byte(bad)); err == nil {
			t.Errorf("command %q was taken", bad)
		}
	}
}

func TestGreeting(t *testing.T) {
	good := appendGreeting(nil, 0)
	if len(good) != greetingLen {
		t.Fatal(len(good))
	}
	change := func(at int, b byte) []byte {
		g := bytes.Clone(good)
		g[at] = b
		return g
	}
	for _, tc := range []struct {
		name  string
		bytes []byte
		minor byte
		bad   string
	}{
		{"ours", good, 1, ""},
		{"3.0", change(11, 0), 0, ""},
		{"a later major version", append(change(10, 4)[:11], append([]byte{0}, good[12:]...)...), 1, ""},
		{"HTTP", []byte("G"), 0, "not a ZMTP greeting"},
		{"ZMTP 1", []byte("\xff\x00\x00\x00\x00\x00\x00\x00\x01\x00"), 0, "1.0"},
		{"ZMTP 2", []byte("\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x01"), 0, "revision 1"},
		{"PLAIN", append(append(bytes.Clone(good[:12]), "PLAIN"...), good[17:]...), 0, `"PLAIN"`},
		{"NULLX", change(16, 'X'), 0, `"NULLX"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			minor, err := parseGreeting(tc.bytes)
			if tc.bad == "" && (err != nil || minor != tc.minor) {
				t.Fatal(minor, err)
			}
			var pe *ProtocolError
			if tc.bad != "" && (!errors.As(err, &pe) || !strings.Contains(err.Error(), tc.bad)) {
				t.Fatal(err)
			}
		})
	}
}

func TestReady(t *testing.T) {
	prop := func(name, value string) []byte { return appendProperty(nil, name, []byte(value)) }
	for _, tc := range []struct {
		name     string
		data     []byte
		typ      socketType
		identity string
		bad      bool
	}{
		{name: "type and identity", data: append(prop("Socket-Type", "DEALER"), prop("Identity", "me")...), typ: typeDealer, identity: "me"},
		{name: "any case, any order, unknown ones", data: append(prop("identity", "me"), append(prop("X-Mas", "!"), prop("SOCKET-TYPE", "REQ")...)...), typ: typeReq, identity: "me"},
		{name: "nothing"},
		{name: "longest identity", data: prop("Identity", strings.Repeat("i", 255)), identity: strings.Repeat("i", 255)},
		{name: "one more", data: prop("Identity", strings.Repeat("i", 256)), bad: true},
		{name: "identity of the reserved kind", data: prop("Identity", "\x00a"), bad: true},
		{name: "empty name", data: prop("", "a"), bad: true},
		{name: "name cut off", data: []byte("\x0bSocket"), bad: true},
		{name: "length cut off", data: []byte("\x01a\x00\x00"), bad: true},
		{name: "value cut off", data: []byte("\x01a\xff\xff\xff\xffx"), bad: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			typ, identity, err := parseReady(tc.data)
			if (err != nil) != tc.bad || typ != tc.typ || string(identity) != tc.identity {
				t.Fatalf("got %q %q %v", typ, identity, err)
			}
		})
	}
	// Which types fit is symmetrical.
	for a, peers := range peersOf {
		for _, b := range peers {
			if !b.fits(a) {
				t.Errorf("%s fits %s, but not the other way round", a, b)
			}
		}
	}
}
