package client

import (
	"context"
	"fmt"

	"github.com/berthkv/berth/internal/localapi"
)

// Inside connects to the agent of this process, without the socket: what
// berth.Agent.Engine does. It is for engines that are written in Go. Every rule
// of the local API holds as over the socket; the pools are mapped once more, the
// receive pool read-only. ctx bounds the call.
func Inside(ctx context.Context, s *localapi.Server, h Hello) (*Client, error) {
	c := &Client{done: make(chan struct{}), calls: map[uint64]*call{}, transfers: map[string]*Transfer{}}
	hello := &call{done: make(chan struct{})}
	c.calls[0] = hello
	var err error
	if c.inside, err = s.Inside(insider{c}); err != nil {
		return nil, err
	}
	if err = c.inside.Send(0, h.request()); err == nil {
		select {
		case <-hello.done:
			err = hello.err
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("the agent of this process: %w", err)
	}
	return c, nil
}

// insider is a client as its agent sees it.
type insider struct{ c *Client }

func (i insider) Reply(id uint64, ans localapi.Answer, err error, fds []int) {
	k := i.c.take(id)
	if k == nil {
		return // it was never sent, or all is lost
	}
	if a, ok := ans.(*localapi.HelloAnswer); ok {
		err = i.c.welcome(a, fds)
	}
	i.c.finish(k, ans, err)
}

func (i insider) Event(ev localapi.Event) { i.c.event(ev) }
func (i insider) Lost(why error)          { i.c.lost(why) }
