/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sizes and places of what programs were compiled with. A field may be added at the end of a
 * structure that begins with `size` (and its new size noted here beside the old ones); nothing may
 * move or vanish.
 */
#include <ckpt.h>
#include <stddef.h>

_Static_assert(sizeof(void *) == 8, "the table below is for 64-bit machines");

#define SIZE(type, bytes) _Static_assert(sizeof(struct type) == bytes, #type)
#define PLACE(type, field, bytes) _Static_assert(offsetof(struct type, field) == bytes, #type "." #field)

SIZE(ckpt_open_options, 64);
PLACE(ckpt_open_options, size, 0);
PLACE(ckpt_open_options, rank, 4);
PLACE(ckpt_open_options, world, 8);
PLACE(ckpt_open_options, flags, 12);
PLACE(ckpt_open_options, run_id, 16);
PLACE(ckpt_open_options, directory, 24);
PLACE(ckpt_open_options, socket, 32);
PLACE(ckpt_open_options, daemon, 40);
PLACE(ckpt_open_options, open_timeout_ms, 48);
PLACE(ckpt_open_options, busy_timeout_ms, 56);

SIZE(ckpt_info, 96); /* 0.1: 88, without push_reason */
PLACE(ckpt_info, connected, 12);
PLACE(ckpt_info, generation, 16);
PLACE(ckpt_info, resumes, 24);
PLACE(ckpt_info, levels, 28);
PLACE(ckpt_info, resume_generation, 32);
PLACE(ckpt_info, resume_step, 40);
PLACE(ckpt_info, push, 48);
PLACE(ckpt_info, image_size, 56);
PLACE(ckpt_info, saves, 64);
PLACE(ckpt_info, skipped, 72);
PLACE(ckpt_info, lost, 80);
PLACE(ckpt_info, push_reason, 88);

SIZE(ckpt_shard, 96);
PLACE(ckpt_shard, dtype, 4);
PLACE(ckpt_shard, name, 8);
PLACE(ckpt_shard, data, 16);
PLACE(ckpt_shard, dimensions, 24);
PLACE(ckpt_shard, flags, 28);
PLACE(ckpt_shard, shape, 32);
PLACE(ckpt_shard, offset, 40);
PLACE(ckpt_shard, extent, 48);
PLACE(ckpt_shard, stride, 56);
PLACE(ckpt_shard, range, 64);
PLACE(ckpt_shard, replica_index, 68);
PLACE(ckpt_shard, replica_count, 72);
PLACE(ckpt_shard, start, 80);
PLACE(ckpt_shard, count, 88);

SIZE(ckpt_save_options, 56); /* 0.1: 40, without streams */
PLACE(ckpt_save_options, to, 4);
PLACE(ckpt_save_options, state, 8);
PLACE(ckpt_save_options, state_size, 16);
PLACE(ckpt_save_options, urgent, 24);
PLACE(ckpt_save_options, check, 28);
PLACE(ckpt_save_options, busy_timeout_ms, 32);
PLACE(ckpt_save_options, streams, 40);
PLACE(ckpt_save_options, stream_count, 48);

SIZE(ckpt_device_usage, 40);
PLACE(ckpt_device_usage, contexts, 4);
PLACE(ckpt_device_usage, imports, 8);
PLACE(ckpt_device_usage, context_bytes, 16);
PLACE(ckpt_device_usage, import_bytes, 24);
PLACE(ckpt_device_usage, arena_bytes, 32);

SIZE(ckpt_durable, 32);
PLACE(ckpt_durable, generation, 8);
PLACE(ckpt_durable, step, 16);
PLACE(ckpt_durable, age_ms, 24);

SIZE(ckpt_version_entry, 48);
PLACE(ckpt_version_entry, created_ns, 24);
PLACE(ckpt_version_entry, world, 32);
PLACE(ckpt_version_entry, levels, 36);
PLACE(ckpt_version_entry, flags, 40);

SIZE(ckpt_restore_options, 32);
PLACE(ckpt_restore_options, which, 4);
PLACE(ckpt_restore_options, generation, 8);
PLACE(ckpt_restore_options, step, 16);
PLACE(ckpt_restore_options, timeout_ms, 24);

SIZE(ckpt_restore_info, 40);
PLACE(ckpt_restore_info, world, 4);
PLACE(ckpt_restore_info, generation, 8);
PLACE(ckpt_restore_info, step, 16);
PLACE(ckpt_restore_info, bytes, 24);
PLACE(ckpt_restore_info, tensors, 32);

SIZE(ckpt_tensor, 48);
PLACE(ckpt_tensor, dtype, 4);
PLACE(ckpt_tensor, name, 8);
PLACE(ckpt_tensor, dimensions, 16);
PLACE(ckpt_tensor, flags, 20);
PLACE(ckpt_tensor, rank, 24);
PLACE(ckpt_tensor, pieces, 28);
PLACE(ckpt_tensor, shape, 32);
PLACE(ckpt_tensor, alias_of, 40);

SIZE(ckpt_read, 104); /* 0.1: 88, without stream */
PLACE(ckpt_read, dtype, 4);
PLACE(ckpt_read, name, 8);
PLACE(ckpt_read, data, 16);
PLACE(ckpt_read, dimensions, 24);
PLACE(ckpt_read, flags, 28);
PLACE(ckpt_read, shape, 32);
PLACE(ckpt_read, offset, 40);
PLACE(ckpt_read, extent, 48);
PLACE(ckpt_read, stride, 56);
PLACE(ckpt_read, range, 64);
PLACE(ckpt_read, rank, 68);
PLACE(ckpt_read, start, 72);
PLACE(ckpt_read, count, 80);
PLACE(ckpt_read, stream, 88);
PLACE(ckpt_read, on_stream, 96);

int main(void) { return 0; }
