package outbound

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

type legacyRequest struct{}

func (legacyRequest) owes() bool { return false }
type legacyPeer struct{}

func (c *Core) legacyConnected(now kv.Instant, conn kv.ConnID)                 {}
func (c *Core) legacyDisconnected(now kv.Instant, conn kv.ConnID, text string) {}
func (c *Core) legacyMalformed(now kv.Instant, conn kv.ConnID, text string)    {}
func (c *Core) legacyReceived(now kv.Instant, conn kv.ConnID, m msg.Message)   {}
func (c *Core) legacyQuit(p *peer)                                             {}
func (c *Core) legacyCancel(now kv.Instant, r *request)                        {}
func (c *Core) pumpLegacy(now kv.Instant, p *peer)                             {}
func (c *Core) metLegacy(now kv.Instant, p *peer) {
	c.failQueued(now, p, fault.Unsupported, "the receiver speaks LMCache's dialect")
}
