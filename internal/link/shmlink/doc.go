// Package shmlink moves chunks between processes of one host by one copy: the
// receiver maps the sender's staging pool for reading and copies from it when
// a Commit names the source. Nothing of the receiver is writable by others,
// and the sender does nothing at all.
//
//	sender ── hello and read-only descriptors, over a unix socket ──► receiver: check, map
//	Commit ──► Pull ──► queue ──► a few copiers (parallel) ──► slot ──► Landed
//
// The socket stays open and silent; its end tells each side that the other is
// gone. A copy counts only if the staging slot's generation word was the same,
// and the expected one, before and after it: so the sender may hand a staging
// slot out again at any time, without a word. The sender cannot hurt the
// receiver: the memory is sealed against shrinking, and a fault in it all the
// same ends this sender's link and nothing else.
//
// A process of the same user could open the descriptors that it was given anew
// for writing; such processes are trusted not to. The pages of the mapped
// staging pools count in the receiver's resident size.
//
// Lock order: the receiver's mu, then the gate's. No callback is called and
// nothing is copied under a lock.
package shmlink
