// Package berth carries the KV cache of prompts from prefill to decode machines
// for disaggregated LLM serving. Every request reserves room for its whole KV
// cache at the decoder before its first byte moves, so that two half-delivered
// requests can never block each other and nothing is half-delivered.
//
// An [Agent] serves one rank of one engine, beside it on the same host. A
// [Proxy] is the HTTP front door. Both run inside any process:
//
//	cfg, err := berth.LoadConfig(berth.Sources{File: "agent.yaml", Env: os.Environ()})
//	agent, err := berth.StartAgent(ctx, cfg, slog.Default())
//	defer agent.Close()
//
// Engines speak to their agent over its unix socket: package client, or
// section 4 of PROTOCOL.md for other languages.
package berth
