package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// plant makes this process, which runs as berth, do something wrong if it is
// the one that the fault is for.
func plant(fault string) {
	args := strings.Join(os.Args[1:], " ")
	is := func(words ...string) bool {
		return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(args, w) })
	}
	switch fault {
	case "no engine":
		if is("engine", "--role decode") {
			fmt.Fprintln(os.Stderr, errPlanted)
			os.Exit(3)
		}
	case "no transfer": // who must wait for room is refused
		if is("agent", "decode.yaml") {
			os.Args = append(os.Args, "--pd-allocation-timeout-sec", "0.001")
		}
	case "wrong token":
		if is("engine", "--role decode") {
			fmt.Fprintln(os.Stderr, wrongTokens(slices.Clone(os.Args[1:])))
			os.Exit(3)
		}
	}
}

var firstToken = regexp.MustCompile(`"token_ids":\[\d+`)

// wrongTokens runs the real engine and serves its answers with one token
// changed in each.
func wrongTokens(args []string) error {
	at := slices.Index(args, "--http") + 1
	address := args[at]
	args[at] = "127.0.0.1:0"
	runtime.LockOSThread() // the parent whose death ends the engine is this thread
	real := exec.Command(os.Args[0], args...)
	real.Env = append(os.Environ(), envPlant+"=")
	real.Stderr = os.Stderr
	real.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := real.StdoutPipe()
	if err != nil {
		return err
	}
	if err := real.Start(); err != nil {
		return err
	}
	var served struct{ HTTP string }
	if err := json.NewDecoder(out).Decode(&served); err != nil {
		return err
	}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: served.HTTP})
	proxy.ModifyResponse = func(r *http.Response) error {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		if i := firstToken.FindIndex(b); i != nil {
			n, _ := strconv.Atoi(string(b[bytes.LastIndexByte(b[:i[1]], '[')+1 : i[1]]))
			b = slices.Concat(b[:i[0]], fmt.Appendf(nil, `"token_ids":[%d`, (n+1)%256), b[i[1]:])
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
		r.Header.Del("Content-Length")
		return nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	json.NewEncoder(os.Stdout).Encode(map[string]string{"HTTP": address})
	return http.Serve(l, proxy)
}
