package client_test

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/msg"
)

// exampleAgent stands in for a running agent, which the example needs.
func exampleAgent() (path string, stop func()) {
	dir, err := os.MkdirTemp("", "berth")
	if err != nil {
		panic(err)
	}
	fd, err := unix.MemfdCreate("staging", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, 8192)
	}
	if err != nil {
		panic(err)
	}
	a := &standIn{fd: fd}
	if a.Server, err = localapi.Listen(localapi.Config{Path: filepath.Join(dir, "agent.sock"), Handler: a}); err != nil {
		panic(err)
	}
	return a.Path(), func() {
		a.Close()
		unix.Close(fd)
		os.RemoveAll(dir)
	}
}

type standIn struct {
	*localapi.Server
	fd int
}

func (a *standIn) Connected(kv.ConnID, localapi.Cred) {}
func (a *standIn) Hangup(kv.CallID)                   {}
func (a *standIn) Disconnected(kv.ConnID)             {}
func (a *standIn) ProcessGone(int)                    {}

func (a *standIn) Request(conn kv.ConnID, call kv.CallID, req localapi.Request) {
	switch r := req.(type) {
	case *localapi.Hello:
		a.SendPools(call, &localapi.HelloAnswer{Version: 1, SlotBytes: 4096, StagingCapacity: 2, MaxStage: 2, Pools: []string{localapi.StagingPool}}, []int{a.fd})
	case *localapi.Stage:
		a.Answer(call, &localapi.Slots{Slots: []kv.SlotID{0, 1}})
	case *localapi.Begin:
		a.Answer(call, &localapi.Done{})
		a.Emit(conn, &localapi.Granted{Req: r.Req})
	case *localapi.Submit:
		a.Answer(call, &localapi.Done{})
		a.Emit(conn, &localapi.Ended{Req: r.Req, Ending: msg.EndReady})
	}
}
