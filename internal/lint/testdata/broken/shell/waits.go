package shell

import (
	"context"
	"log/slog"
	"net"
	web "net/http"
	"os/signal"
	"time"
)

func endless(ctx context.Context) {
	wait(context.Background())
	wait(context.TODO())
	net.Dial("tcp", "a:1")
	web.Get("http://a")
	web.DefaultClient.Do(nil)
	serve(&web.Server{Addr: "a:1"})
}

// What looks alike and is fine.
func bounded(log *slog.Logger, net dialer) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	wait(ctx)
	stop, cancel := signal.NotifyContext(context.Background())
	wait(stop)
	log.LogAttrs(context.Background(), slog.LevelInfo, "no wait")
	serve(&web.Server{ReadHeaderTimeout: time.Second})
	time.Sleep(0) // not in a test
}
