package main

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/spf13/cobra"

	"github.com/berthkv/berth"
)

// FuzzStatus is any answer to a status call: what can be read can be shown.
func FuzzStatus(f *testing.F) {
	f.Add([]byte(`{"node":"n","ready":true,"pool":{"capacity":4,"free":4},"requests":[{"id":"r","why":{"for":"room","need":3}}],"peers":[{"addr":"h:1"}]}`))
	f.Add([]byte(`{"requests":[{}],"staging":{}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var s berth.Status
		if json.Unmarshal(b, &s) != nil {
			return
		}
		var out bytes.Buffer
		cmd := &cobra.Command{}
		cmd.SetOut(&out)
		printStatus(cmd, s)
		if out.Len() == 0 {
			t.Error("nothing is shown")
		}
	})
}
