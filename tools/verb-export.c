/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `export`: plain safetensors files out of a version. Merged (also --tensors and --hf): merge.c
 * plans the file, and every wanted piece is read in the order in which it is stored and scattered
 * to its place in the mapped output. --part and --split: the images themselves, as captured.
 * Everything read is verified; a damaged chunk is read from another root if one has it.
 */
#include "tools/hold.h"
#include "tools/merge.h"
#include "tools/output.h"
#include "tools/source.h"
#include "tools/table.h"

#include <errno.h>
#include <inttypes.h>
#include <sys/stat.h>

struct exporting {
    const struct inventory *inventory;
    const struct inventory_version *version;
    const struct complete *complete;
    struct hold hold;
    uint64_t files, bytes;
};

/* One piece on its way into its tensor: geometry_intersect() calls with runs that both have. */
struct scatter {
    struct source *source;
    struct hold *hold;
    uint64_t image_offset;
    char *tensor;
    unsigned element;
};

static int scatter_run(void *context, uint64_t piece_offset, uint64_t tensor_offset, uint64_t count) {
    struct scatter *scatter = context;
    hold_renew(scatter->hold);
    return source_read(scatter->source, scatter->image_offset + piece_offset * scatter->element,
                       count * scatter->element, scatter->tensor + tensor_offset * scatter->element);
}

static int bring_piece(struct exporting *exporting, struct source *source, const struct merge_piece *piece,
                       const struct merge_tensor *tensor, struct output *output) {
    struct scatter scatter = {
        .source = source,
        .hold = &exporting->hold,
        .image_offset = piece->image_offset,
        .tensor = output->data + tensor->offset,
        .element = dtype_size(tensor->dtype),
    };
    if (!piece->piece)
        return source_read(source, piece->image_offset, tensor->bytes, scatter.tensor);
    return geometry_intersect(&piece->piece->geometry, &tensor->geometry, scatter_run, &scatter);
}

static int bring_pieces(struct exporting *exporting, const struct merge *merge, struct output *output) {
    struct source source = {0};
    int status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < merge->piece_count; i++) {
        const struct merge_piece *piece = &merge->pieces[i];
        if (i == 0 || piece->rank != merge->pieces[i - 1].rank) {
            source_close(&source);
            status = source_open(exporting->inventory, exporting->version->id, &exporting->complete->parts[piece->rank],
                                 &source);
        }
        if (status == STATUS_OK)
            status = bring_piece(exporting, &source, piece, &merge->tensors[piece->tensor], output);
    }
    source_close(&source);
    return status;
}

static int export_merged(struct exporting *exporting, const struct merge_options *options, const char *path) {
    CLEANUP(merge_deinit) struct merge merge = {0};
    CLEANUP(output_abandon) struct output output = OUTPUT_NONE;
    int status = merge_plan(exporting->complete, options, &merge);
    if (status == STATUS_OK)
        status = output_begin(&output, path, merge.size);
    if (status != STATUS_OK)
        return status;
    memcpy(output.data, merge.header, merge.header_length);
    status = bring_pieces(exporting, &merge, &output);
    if (status != STATUS_OK)
        return status;
    exporting->files++;
    exporting->bytes += merge.size;
    return output_finish(&output);
}

static int export_part(struct exporting *exporting, uint32_t rank, const char *path) {
    const struct complete_part *part = &exporting->complete->parts[rank];
    CLEANUP(source_close) struct source source = {0};
    CLEANUP(output_abandon) struct output output = OUTPUT_NONE;
    int status = source_open(exporting->inventory, exporting->version->id, part, &source);
    if (status == STATUS_OK)
        status = output_begin(&output, path, part->image_size);
    for (uint64_t at = 0; status == STATUS_OK && at < part->image_size; at += part->chunk_size) {
        hold_renew(&exporting->hold);
        status = source_read(&source, at, min_u64(part->chunk_size, part->image_size - at), output.data + at);
    }
    if (status != STATUS_OK)
        return status;
    exporting->files++;
    exporting->bytes += part->image_size;
    return output_finish(&output);
}

static int export_split(struct exporting *exporting, const char *directory) {
    if (mkdir(directory, 0777) < 0 && errno != EEXIST)
        return ctl_fail(STATUS_STORAGE, "cannot make the directory %s: %s", directory, strerror(errno));
    for (uint32_t rank = 0; rank < exporting->complete->summary.world; rank++) {
        char name[64], path[PATH_MAX];
        manifest_data_name(rank, CODEC_RAW, name);
        if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, name) >= sizeof path)
            return ctl_fail(STATUS_USAGE, "the name %s is too long", directory);
        int status = export_part(exporting, rank, path);
        if (status != STATUS_OK)
            return status;
    }
    return STATUS_OK;
}

static int export_version(struct ctl *ctl, struct exporting *exporting) {
    uint32_t world = exporting->complete->summary.world;
    if (ctl->split)
        return export_split(exporting, ctl->output);
    if (ctl->has_part)
        return ctl->part < world ? export_part(exporting, ctl->part, ctl->output)
                                 : ctl_fail(STATUS_ABSENT, "there is no rank %" PRIu32 ": the version has %" PRIu32,
                                            ctl->part, world);
    struct merge_options options = {
        .globs = ctl->tensors,
        .glob_count = ctl->tensor_count,
        .model = ctl->hf,
        .prefix = ctl->prefix ? ctl->prefix : "model/",
    };
    return export_merged(exporting, &options, ctl->output);
}

static int check_options(struct ctl *ctl) {
    if (!ctl->output)
        return ctl_fail(STATUS_USAGE, "export needs -o OUT");
    if (!ctl->output[0])
        return ctl_fail(STATUS_USAGE, "-o has an empty name");
    if (ctl->split + ctl->has_part + ctl->hf + (ctl->tensor_count > 0) > 1)
        return ctl_fail(STATUS_USAGE, "export takes only one of --part, --split, --tensors and --hf");
    if (ctl->prefix && !ctl->hf)
        return ctl_fail(STATUS_USAGE, "--prefix goes with --hf");
    return STATUS_OK;
}

static int report(struct ctl *ctl, const struct exporting *exporting) {
    char bytes[FORMAT_MAX];
    if (ctl->json)
        return ctl_print_json(json_pack("{s:s, s:I, s:I, s:s, s:I, s:I}", "job", exporting->inventory->job,
                                        "generation", (json_int_t)exporting->version->id.generation, "step",
                                        (json_int_t)exporting->version->id.step, "output", ctl->output, "files",
                                        (json_int_t)exporting->files, "bytes", (json_int_t)exporting->bytes));
    printf("%s: %s of version %" PRIu64 "/%" PRIu64 "\n", ctl->output, format_bytes(exporting->bytes, bytes),
           exporting->version->id.generation, exporting->version->id.step);
    return STATUS_OK;
}

int verb_export(struct ctl *ctl) {
    CLEANUP(roots_close) struct roots roots = {0};
    CLEANUP(inventory_free) struct inventory inventory = {0};
    CLEANUP(complete_deinit) struct complete complete = {0};
    struct exporting exporting = {.inventory = &inventory, .complete = &complete};
    int status = check_options(ctl);
    if (status == STATUS_OK)
        status = inventory_open(ctl, &roots, &inventory);
    if (status == STATUS_OK)
        status = inventory_find(&inventory, ctl->word_count > 1 ? ctl->words[1] : NULL, &exporting.version);
    if (status != STATUS_OK)
        return status;
    hold_take(&exporting.hold, &inventory, exporting.version);
    status = inventory_complete(&inventory, exporting.version, &complete);
    if (status == STATUS_OK)
        status = export_version(ctl, &exporting);
    hold_release(&exporting.hold);
    return status == STATUS_OK ? report(ctl, &exporting) : status;
}
